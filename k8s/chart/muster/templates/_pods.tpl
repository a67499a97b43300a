{{- define "muster.service" -}}
{{- /* prints the values of the service .name */ -}}
{{- $name := trimPrefix "muster-" .name -}}
{{- if hasPrefix "fuse-" $name -}}
{{- toJson (index .root.Values.fuse (trimPrefix "fuse-" $name)) -}}
{{- else -}}
{{- toJson (index .root.Values $name) -}}
{{- end -}}
{{- end -}}

{{- define "muster.pods" -}}
{{- /* puts the values of a service, .values, into its workload, .object, in place */ -}}
{{- $values := .values -}}
{{- $root := .root.Values -}}
{{- $pod := .object.spec.template -}}
{{- $spec := $pod.spec -}}
{{- $ours := $root.image -}}
{{- if and (eq .object.kind "DaemonSet") $root.nodeImage.repository -}}
{{- $ours = merge (deepCopy $root.nodeImage) (omit $root.image "repository" "digest") -}}
{{- end -}}
{{- range $container := concat $spec.containers ($spec.initContainers | default list) -}}
{{- $image := ternary $root.nats.image $ours (contains "/nats:" .image) -}}
{{- $_ := set . "image" (include "muster.image" $image) -}}
{{- with $image.pullPolicy }}{{ $_ := set $container "imagePullPolicy" . }}{{ end -}}
{{- end -}}
{{- with $root.imagePullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end -}}
{{- range tuple "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" -}}
{{- if hasKey $values . }}{{ $_ := set $spec . (index $values .) }}{{ end -}}
{{- end -}}
{{- with $values.nodeSelector }}{{ $_ := set $spec "nodeSelector" (merge (deepCopy .) ($spec.nodeSelector | default dict)) }}{{ end -}}
{{- /* selectors depend on the labels that there are */ -}}
{{- with $values.podLabels }}{{ $_ := set $pod.metadata "labels" (merge $pod.metadata.labels .) }}{{ end -}}
{{- with $values.podAnnotations }}{{ $_ := set $pod.metadata "annotations" (merge (deepCopy .) ($pod.metadata.annotations | default dict)) }}{{ end -}}
{{- $main := first $spec.containers -}}
{{- with $values.resources }}{{ $_ := set $main "resources" (mergeOverwrite $main.resources .) }}{{ end -}}
{{- range $key, $extra := dict "env" $values.extraEnv "envFrom" $values.extraEnvFrom "volumeMounts" $values.extraVolumeMounts -}}
{{- with $extra }}{{ $_ := set $main $key (concat (index $main $key | default list) .) }}{{ end -}}
{{- end -}}
{{- with $values.extraVolumes }}{{ $_ := set $spec "volumes" (concat ($spec.volumes | default list) .) }}{{ end -}}
{{- with $values.updateStrategy }}{{ $_ := set $.object.spec "updateStrategy" . }}{{ end -}}
{{- end -}}

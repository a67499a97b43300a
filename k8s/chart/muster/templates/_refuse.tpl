{{- define "muster.refuse" -}}
{{- /* refuses values that cannot be intended, with one line for each */ -}}
{{- $v := .Values -}}
{{- $known := .Files.Get "files/known.yaml" | fromYaml -}}
{{- $problems := include "muster.unknown" (dict "values" $v "known" $known.values "definitions" $known.definitions "path" list) -}}
{{- if not $problems -}}
{{- $problems = include "muster.problems" . -}}
{{- if $v.checkCluster }}{{ $problems = print $problems (include "muster.lacks" .) }}{{ end -}}
{{- end -}}
{{- with $problems | trim }}{{ fail (printf "\n%s" .) }}{{ end -}}
{{- end -}}

{{- define "muster.problems" -}}
{{- $v := .Values -}}
{{- $plugin := $v.settings.plugin -}}
{{- if $v.watch.enabled -}}
{{- range concat ($plugin.resources | default list) ($v.devices | default list) -}}
{{- if ne .name "smarter-devices/fuse" }}
watch.enabled serves no device, but {{ ternary "devices" "settings.plugin.resources" (not (empty $v.devices)) }} has {{ .name }}: for both, omit watch.enabled and set settings.plugin.watch.enabled
{{- end }}
{{- end }}
{{- if or $plugin.gpus $plugin.nodes $plugin.watch }}
watch.enabled serves no device: omit gpus, nodes and watch from settings.plugin
{{- end }}
{{- if $v.gpu.enabled }}
watch.enabled serves no device: omit gpu.enabled
{{- end }}
{{- end }}
{{- if and $v.gpu.enabled $v.watch.drivers }}
watch.drivers and gpu.enabled both mount /var/run/cdi: choose one of them
{{- end }}
{{- with include "muster.writing" . | fromJson }}
{{- if not (or .header .oidc) }}
settings.console.writing has neither header nor oidc: set one of them, so that the console can identify people
{{- else if not .url }}
settings.console.writing needs console.url: the address of the console in browsers, such as https://console.example.com/
{{- end }}
{{- end }}
{{- end -}}

{{- define "muster.lacks" -}}
{{- /* prints the missing objects without which nothing would start; nothing without access to a cluster, as with `helm template` */ -}}
{{- $v := .Values -}}
{{- $namespace := include "muster.namespace" . -}}
{{- $fullname := include "muster.fullname" . -}}
{{- if not (or $v.nats.external.url $v.nats.storage.className) -}}
{{- $classes := lookup "storage.k8s.io/v1" "StorageClass" "" "" -}}
{{- $names := list -}}
{{- $default := not (hasKey $classes "items") -}}
{{- range $classes.items -}}
{{- $names = append $names .metadata.name -}}
{{- if eq "true" (dig "metadata" "annotations" "storageclass.kubernetes.io/is-default-class" "" .) }}{{ $default = true }}{{ end -}}
{{- end -}}
{{- if not (or $default (lookup "v1" "PersistentVolumeClaim" $namespace (printf "data-%s-nats-0" $fullname))) }}
the cluster has no default StorageClass, and NATS needs a volume: set nats.storage.className{{ with $names }} (there are: {{ sortAlpha . | join ", " }}){{ else }} (there is none at all: install a storage provider first){{ end }}, or make one the default
{{- end }}
{{- end -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $annotations := .metadata.annotations | default dict -}}
{{- $by := index $annotations "meta.helm.sh/release-name" | default "" -}}
{{- $where := (first (.subjects | default (list dict))).namespace | default "muster" -}}
{{- $ours := and (eq $by $.Release.Name) (eq $.Release.Namespace (index $annotations "meta.helm.sh/release-namespace" | default "")) -}}
{{- if and (eq "muster-labeler" (index $labels "app.kubernetes.io/name" | default "")) (not $ours) }}
muster is installed already, in the namespace {{ $where }} ({{ with $by }}the release {{ . }}{{ else }}without Helm{{ end }}), and two in one cluster would both change its nodes: upgrade that one, or first remove it: muster uninstall{{ if ne $where "muster" }} --muster-namespace {{ $where }}{{ end }}
{{- end }}
{{- end -}}
{{- $enforced := dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" (lookup "v1" "Namespace" "" $namespace) -}}
{{- if has $enforced (list "baseline" "restricted") }}
the namespace {{ $namespace }} enforces the Pod Security level {{ $enforced }}, and the plugin mounts the kubelet's directory: kubectl label namespace {{ $namespace }} --overwrite pod-security.kubernetes.io/enforce=privileged
{{- end -}}
{{- $secrets := lookup "v1" "Secret" $namespace "" -}}
{{- if hasKey $secrets "items" -}}
{{- range (include "muster.settings" . | fromJson).secrets -}}
{{- $wanted := . -}}
{{- $problem := printf "there is no Secret %s: kubectl -n %s create secret generic %s --from-literal=%s=..." .name $namespace .name .key -}}
{{- range $secrets.items -}}
{{- if eq .metadata.name $wanted.name -}}
{{- $value := index (.data | default dict) $wanted.key | default "" | b64dec | trim -}}
{{- $problem = ternary "" (printf "the key %s of the Secret %s is missing or empty" $wanted.key $wanted.name) (ne $value "") -}}
{{- end -}}
{{- end -}}
{{- with $problem }}
receivers: {{ . }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "muster.unknown" -}}
{{- /* prints a line for each name in .values that is not in .known, with the nearest known name */ -}}
{{- $call := . -}}
{{- $known := .known -}}
{{- if kindIs "string" $known }}{{ $known = index .definitions $known }}{{ end -}}
{{- if and (kindIs "slice" $known) (kindIs "slice" .values) -}}
{{- range $at, $value := .values -}}
{{- include "muster.unknown" (dict "values" $value "known" (first $known) "path" (append $call.path $at) "definitions" $call.definitions) -}}
{{- end -}}
{{- else if and (kindIs "map" $known) (kindIs "map" .values) -}}
{{- $names := keys $known | sortAlpha -}}
{{- range $name, $value := .values -}}
{{- if hasKey $known $name -}}
{{- include "muster.unknown" (dict "values" $value "known" (index $known $name) "path" (append $call.path $name) "definitions" $call.definitions) -}}
{{- else }}
unknown value {{ append $call.path $name | join "." }}
{{- with include "muster.nearest" (dict "name" $name "names" $names) }}: did you mean {{ append $call.path . | join "." }}?{{ else }}; there are: {{ join ", " $names }}{{ end }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "muster.nearest" -}}
{{- /* prints the one of .names with the smallest edit distance to .name; nothing if none is near */ -}}
{{- $best := max 3 (add1 (div (len .name) 3)) | int -}}
{{- $nearest := "" -}}
{{- range .names -}}
{{- $distance := include "muster.distance" (dict "from" (lower $.name) "to" (lower .)) | int -}}
{{- if and (gt (len $.name) 2) (hasPrefix $.name .) }}{{ $distance = 1 }}{{ end -}}
{{- if lt $distance $best }}{{ $best = $distance }}{{ $nearest = . }}{{ end -}}
{{- end -}}
{{- $nearest -}}
{{- end -}}

{{- define "muster.distance" -}}
{{- /* prints the Levenshtein distance of .from and .to */ -}}
{{- $from := splitList "" (trunc 40 .from) -}}
{{- $to := splitList "" .to -}}
{{- $row := untilStep 0 (add1 (len $to) | int) 1 -}}
{{- range $from -}}
{{- $letter := . -}}
{{- $next := list (add1 (first $row)) -}}
{{- range $at, $other := $to -}}
{{- $changed := add (index $row $at) (ternary 0 1 (eq $letter $other)) -}}
{{- $next = append $next (min $changed (add1 (last $next)) (add1 (index $row (add1 $at | int)))) -}}
{{- end -}}
{{- $row = $next -}}
{{- end -}}
{{- last $row -}}
{{- end -}}

{{- define "muster.change" -}}
{{- /* changes .object in place by what the values say of the service .name */ -}}
{{- $v := .root.Values -}}
{{- $object := .object -}}
{{- $values := dict -}}
{{- if .name }}{{ $values = include "muster.service" . | fromJson }}{{ end -}}
{{- if eq .name "muster-keys" -}}
{{- /* the keys are there before anything mounts them; Helm shows the log of a Job that fails */ -}}
{{- $hook := dict "helm.sh/hook" "pre-install,pre-upgrade" "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" -}}
{{- $_ := set $hook "helm.sh/hook-weight" (ternary "0" "-5" (eq $object.kind "Job")) -}}
{{- if eq $object.kind "Job" }}{{ $_ := set $hook "helm.sh/hook-output-log-policy" "hook-failed" }}{{ end -}}
{{- $_ := set $object.metadata "annotations" $hook -}}
{{- end -}}
{{- if hasKey ($object.spec | default dict) "template" -}}
{{- include "muster.reads" . -}}
{{- include "muster.pods" (set . "values" $values) -}}
{{- if eq $object.kind "StatefulSet" -}}
{{- $claim := (first $object.spec.volumeClaimTemplates).spec -}}
{{- $_ := set $claim.resources.requests "storage" $v.nats.storage.size -}}
{{- with $v.nats.storage.className }}{{ $_ := set $claim "storageClassName" . }}{{ end -}}
{{- end -}}
{{- else if eq $object.kind "ServiceAccount" -}}
{{- with ($values.serviceAccount).annotations }}{{ $_ := set $object.metadata "annotations" (merge (deepCopy .) ($object.metadata.annotations | default dict)) }}{{ end -}}
{{- else if has $object.kind (list "PodMonitor" "PrometheusRule") -}}
{{- $_ := set $object.metadata "labels" (mergeOverwrite $object.metadata.labels $v.monitoring.labels) -}}
{{- with $runbooks := (($v.settings).health).runbook_url -}}
{{- range $object.spec.groups }}{{ range .rules -}}
{{- $_ := set .annotations "runbook_url" (printf "%s%s" $runbooks (base .annotations.runbook_url)) -}}
{{- end }}{{ end -}}
{{- end -}}
{{- else if hasSuffix "-console-oidc" $object.metadata.name -}}
{{- $port := regexFind ":[0-9]+$" (urlParse .settings.settings.console.writing.oidc.issuer).host | trimPrefix ":" | default "443" | int -}}
{{- $_ := set $object.spec "egress" (list (dict "ports" (list (dict "port" $port "protocol" "TCP")))) -}}
{{- else if and (eq $object.kind "NetworkPolicy") $v.nats.external.url (has "Egress" $object.spec.policyTypes) $object.spec.egress -}}
{{- $port := (urlParse $v.nats.external.url).host | splitList ":" | last | int -}}
{{- $to := dict "ports" (list (dict "port" $port "protocol" "TCP")) -}}
{{- $_ := set $object.spec "egress" (prepend (rest $object.spec.egress) $to) -}}
{{- end -}}
{{- end -}}

{{- define "muster.reads" -}}
{{- /* lets a workload restart when what it reads at its start changes, and gives it what this release differs in */ -}}
{{- $v := .root.Values -}}
{{- $spec := .object.spec.template.spec -}}
{{- $main := first $spec.containers -}}
{{- $service := trimPrefix "muster-" .name -}}
{{- $read := "" -}}
{{- if eq $service "nats" -}}
{{- $read = (.root.Files.Glob "files/*.conf").AsConfig -}}
{{- else if has $service (list "health" "labeler" "notifier" "fuse" "console") -}}
{{- $read = index .settings.settings $service | toYaml -}}
{{- end -}}
{{- if $read -}}
{{- $_ := set .object.spec.template.metadata "annotations" (dict "checksum/settings" (sha256sum $read)) -}}
{{- end -}}
{{- $env := dict -}}
{{- $directory := trimSuffix "/" $v.kubelet.directory -}}
{{- if ne $directory "/var/lib/kubelet" -}}
{{- if eq $service "plugin" }}{{ $_ := set $env "MUSTER_PLUGIN__KUBELET__DIRECTORY" $directory }}{{ end -}}
{{- if eq $service "fuse" }}{{ $_ := set $env "MUSTER_FUSE__KUBELET__DIRECTORY" $directory }}{{ end -}}
{{- if eq $service "fuse-dra" }}{{ $_ := set $env "MUSTER_FUSE_DRA__REGISTRY" (printf "%s/plugins_registry" $directory) }}{{ end -}}
{{- end -}}
{{- $fullname := include "muster.fullname" .root -}}
{{- if ne $fullname "muster" -}}
{{- if eq $service "gate" -}}
{{- $_ := set $env "MUSTER_GATE__TOKENS__ACCOUNT" (printf "%s-plugin" $fullname) -}}
{{- $_ := set $env "MUSTER_GATE__TOKENS__OTHERS" (printf "{%s-fuse: [fuse-broker]}" $fullname) -}}
{{- end -}}
{{- if eq $service "keys" }}{{ $_ := set $env "MUSTER_AUTH_NAME" $fullname }}{{ end -}}
{{- if eq $service "labeler" }}{{ $_ := set $env "MUSTER_LABELER__LEASE__NAME" (printf "%s-labeler" $fullname) }}{{ end -}}
{{- if eq $service "fuse-webhook" }}{{ $_ := set $env "MUSTER_FUSE_WEBHOOK__KUBERNETES__NAME" (printf "%s-fuse-webhook" $fullname) }}{{ end -}}
{{- end -}}
{{- range $name, $value := $env -}}
{{- $_ := set $main "env" (append $main.env (dict "name" $name "value" $value)) -}}
{{- end -}}
{{- if and (eq $service "notifier") .settings.secrets -}}
{{- $sources := list -}}
{{- range .settings.secrets -}}
{{- $items := list (dict "key" .key "path" (printf "%s/%s" .name .key)) -}}
{{- $sources = append $sources (dict "secret" (dict "name" .name "items" $items)) -}}
{{- end -}}
{{- $_ := set $main "volumeMounts" (append $main.volumeMounts (dict "name" "secrets" "mountPath" "/etc/muster-secrets" "readOnly" true)) -}}
{{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "secrets" "projected" (dict "sources" $sources))) -}}
{{- end -}}
{{- end -}}

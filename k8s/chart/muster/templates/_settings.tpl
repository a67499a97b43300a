{{- define "muster.settings" -}}
{{- /* prints the settings of every service, and the Secrets that the notifier's refer to */ -}}
{{- $v := .Values -}}
{{- $all := deepCopy $v.settings -}}
{{- $fullname := include "muster.fullname" . -}}
{{- if $v.devices -}}
{{- $_ := set $all.plugin "resources" $v.devices -}}
{{- end -}}
{{- if $v.gpu.enabled -}}
{{- $_ := set $all.plugin "gpus" ($all.plugin.gpus | default dict) -}}
{{- end -}}
{{- if $v.watch.enabled -}}
{{- $watch := dict "enabled" true -}}
{{- range $key := list "expect" "ignore" -}}
{{- with index $v.watch $key }}{{ $_ := set $watch $key . }}{{ end -}}
{{- end -}}
{{- $_ := set $all "plugin" (set (omit $all.plugin "resources") "watch" $watch) -}}
{{- end -}}
{{- if $v.fuse.enabled -}}
{{- $scope := dict "plugin" "fuse-broker" "daemonset" "muster-fuse" -}}
{{- $_ := set $all.health.cluster "plugins" (append $all.health.cluster.plugins $scope) -}}
{{- else -}}
{{- $_ := unset $all "fuse" -}}
{{- end -}}
{{- if ($v.console).enabled -}}
{{- $health := list -}}
{{- range $all.console.health }}{{ $health = append $health (. | replace "//muster-" (printf "//%s-" $fullname)) }}{{ end -}}
{{- $_ := set $all.console "health" $health -}}
{{- with include "muster.writing" . | fromJson }}{{ $_ := set $all.console "writing" . }}{{ end -}}
{{- with $v.console.url -}}
{{- $_ := set $all.notifier "console_url" ($all.notifier.console_url | default .) -}}
{{- $_ := set $all.console "hosts" (append $all.console.hosts (urlParse .).hostname | uniq) -}}
{{- end -}}
{{- else -}}
{{- $_ := unset $all "console" -}}
{{- end -}}
{{- range (($all.health).cluster).plugins -}}
{{- $_ := set . "namespace" (.namespace | default (include "muster.namespace" $)) -}}
{{- $_ := set . "daemonset" (.daemonset | replace "muster-" (printf "%s-" $fullname)) -}}
{{- end -}}
{{- with $v.receivers }}{{ $_ := set $all.notifier "receivers" (deepCopy .) }}{{ end -}}
{{- $secrets := dict -}}
{{- include "muster.secrets" (dict "tree" $all.notifier "secrets" $secrets) -}}
{{- $sorted := list -}}
{{- range keys $secrets | sortAlpha }}{{ $sorted = append $sorted (index $secrets .) }}{{ end -}}
{{- dict "settings" $all "secrets" $sorted | toJson -}}
{{- end -}}

{{- define "muster.writing" -}}
{{- /* prints who may act in the console; nothing if there is no console, or nobody may */ -}}
{{- $console := .Values.console | default dict -}}
{{- $writing := ((.Values.settings).console).writing | default dict -}}
{{- if and $console.enabled $writing -}}
{{- merge (dict "url" ($writing.url | default $console.url | default "")) $writing | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- define "muster.resources" -}}
{{- /* prints the names of the resources that the plugin with these settings serves, but those of single nodes */ -}}
{{- $resources := list -}}
{{- range .resources }}{{ $resources = append $resources .name }}{{ end -}}
{{- if hasKey . "gpus" }}{{ $resources = append $resources "nvidia.com/gpu" }}{{ end -}}
{{- toJson $resources -}}
{{- end -}}

{{- define "muster.secrets" -}}
{{- /* changes each secretRef in .tree to the file that it is mounted as, and adds it to .secrets */ -}}
{{- $secrets := .secrets -}}
{{- if kindIs "slice" .tree -}}
{{- range .tree }}{{ include "muster.secrets" (dict "tree" . "secrets" $secrets) }}{{ end -}}
{{- else if kindIs "map" .tree -}}
{{- with .tree.secretRef -}}
{{- $_ := set $secrets (printf "%s/%s" .name .key) . -}}
{{- $_ := set $.tree "file" (printf "/etc/muster-secrets/%s/%s" .name .key) -}}
{{- $_ := unset $.tree "secretRef" -}}
{{- end -}}
{{- range .tree }}{{ include "muster.secrets" (dict "tree" . "secrets" $secrets) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "muster.refuse" -}}
{{- /* refuses values that cannot be meant: one line for each */ -}}
{{- $v := .Values -}}
{{- $known := .Files.Get "files/known.yaml" | fromYaml -}}
{{- $problems := include "muster.unknown" (dict "values" $v "known" $known "path" list) -}}
{{- if not $problems -}}
{{- $problems = include "muster.problems" . -}}
{{- end -}}
{{- with $problems | trim }}{{ fail (printf "\n%s" .) }}{{ end -}}
{{- end -}}

{{- define "muster.problems" -}}
{{- $v := .Values -}}
{{- $plugin := $v.settings.plugin -}}
{{- if $v.watch.enabled -}}
{{- range concat ($plugin.resources | default list) ($v.devices | default list) -}}
{{- if ne .name "smarter-devices/fuse" }}
watch.enabled serves no device, but {{ ternary "devices" "settings.plugin.resources" (not (empty $v.devices)) }} has {{ .name }}: for both, leave watch.enabled out and set settings.plugin.watch.enabled
{{- end }}
{{- end }}
{{- if or $plugin.gpus $plugin.nodes $plugin.watch }}
watch.enabled serves no device: leave gpus, nodes and watch out of settings.plugin
{{- end }}
{{- if $v.gpu.enabled }}
watch.enabled serves no device: leave gpu.enabled out
{{- end }}
{{- end }}
{{- if and $v.gpu.enabled $v.watch.drivers }}
watch.drivers and gpu.enabled both mount /var/run/cdi: choose one of them
{{- end }}
{{- end -}}

{{- define "muster.unknown" -}}
{{- /* prints a line for each name in .values that .known has not, with the nearest that it has */ -}}
{{- $path := .path -}}
{{- $known := .known -}}
{{- range $name, $value := .values -}}
{{- $where := append $path $name -}}
{{- if not (hasKey $known $name) -}}
{{- $names := keys $known | sortAlpha }}
unknown value {{ join "." $where }}
{{- with include "muster.nearest" (dict "name" $name "names" $names) }}: did you mean {{ append $path . | join "." }}?{{ else }}; there are: {{ join ", " $names }}{{ end }}
{{- else if and (kindIs "map" $value) (index $known $name) -}}
{{- include "muster.unknown" (dict "values" $value "known" (index $known $name) "path" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "muster.nearest" -}}
{{- /* prints which of .names is the nearest to .name, by the changes of one letter between them; nothing if none is near */ -}}
{{- $best := max 3 (add1 (div (len .name) 3)) | int -}}
{{- $nearest := "" -}}
{{- range .names -}}
{{- $distance := include "muster.distance" (dict "from" (lower $.name) "to" (lower .)) | int -}}
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

{{- define "muster.patch" -}}
{{- /* changes .object in place by .operation of a JSON patch (RFC 6902): add, replace or remove */ -}}
{{- $steps := splitList "/" (trimPrefix "/" .operation.path) -}}
{{- $node := .object -}}
{{- $parent := dict -}}
{{- $key := "" -}}
{{- range initial $steps -}}
{{- $parent = $node -}}
{{- $key = . -}}
{{- if kindIs "slice" $node }}{{ $node = index $node (atoi .) }}{{ else }}{{ $node = index $node . }}{{ end -}}
{{- end -}}
{{- $last := last $steps -}}
{{- if and (kindIs "map" $node) (eq .operation.op "remove") -}}
{{- $_ := unset $node $last -}}
{{- else if kindIs "map" $node -}}
{{- $_ := set $node $last .operation.value -}}
{{- else -}}
{{- $at := ternary (len $node) (atoi $last) (eq $last "-") -}}
{{- $after := ternary $at (add1 $at | int) (eq .operation.op "add") -}}
{{- $between := ternary list (list .operation.value) (eq .operation.op "remove") -}}
{{- $_ := set $parent $key (concat (slice $node 0 $at) $between (slice $node $after)) -}}
{{- end -}}
{{- end -}}

{{- define "muster.parts" -}}
{{- /* prints the names of the parts of files/manifests.yaml that the values ask for, in their order */ -}}
{{- $v := .Values -}}
{{- $fuse := or $v.fuse.enabled false -}}
{{- $writing := include "muster.writing" . | fromJson -}}
{{- $keys := and ($v.keys).create (not $v.nats.external.url) -}}
{{- $parts := list "base" -}}
{{- range list
  (list $v.production.enabled "production")
  (list $v.gpu.enabled "gpu")
  (list $fuse "fuse-broker")
  (list (and $fuse $v.production.enabled) "fuse-broker-tls")
  (list $v.fuse.webhook.enabled "fuse-webhook")
  (list $v.fuse.nri.enabled "fuse-nri")
  (list $v.fuse.dra.enabled "fuse-dra")
  (list ($v.console).enabled "console")
  (list $writing "console-writing")
  (list $writing.oidc "console-oidc")
  (list (and ($v.console).enabled $v.production.enabled) "console-production")
  (list (and $writing $v.production.enabled) "console-writing-production")
  (list $v.openshift.enabled "openshift")
  (list $v.watch.enabled "watch")
  (list $v.watch.enabled "watch-rights")
  (list $v.watch.hostPID "watch-processes")
  (list $v.watch.drivers "watch-drivers")
  (list $v.monitoring.enabled "monitoring")
  (list $keys "keys")
  (list (and $keys $v.production.enabled) "keys-production")
-}}
{{- if first . }}{{ $parts = append $parts (last .) }}{{ end -}}
{{- end -}}
{{- toJson $parts -}}
{{- end -}}

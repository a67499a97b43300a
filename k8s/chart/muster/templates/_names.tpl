{{- define "muster.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end -}}

{{- define "muster.fullname" -}}
{{ .Values.fullnameOverride | default "muster" }}
{{- end -}}

{{- define "muster.image" -}}
{{ .repository }}{{ with .digest }}@{{ . }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}

{{- define "muster.placed" -}}
{{- /* prints .object as JSON, with the namespace, the names and the address of NATS of this release */ -}}
{{- $namespace := include "muster.namespace" .root -}}
{{- $fullname := include "muster.fullname" .root -}}
{{- $text := toJson .object
  | replace "\"namespace\":\"muster\"" (printf "\"namespace\":%q" $namespace)
  | replace "serviceaccount:muster:" (printf "serviceaccount:%s:" $namespace)
  | replace "\"kube-node-lease\",\"muster\"]" (printf "\"kube-node-lease\",%q]" $namespace) -}}
{{- with .root.Values.nats.external.url -}}
{{- $url := urlParse . -}}
{{- $text = regexReplaceAll "\"(nats|tls)://([^\"@]*@)?muster-nats:4222\"" $text (printf "\"%s://${2}%s\"" $url.scheme $url.host) -}}
{{- end -}}
{{- if and (ne $fullname "muster") (not (has .object.kind (list "PodMonitor" "PrometheusRule"))) -}}
{{- $named := "([^\\\\]\"|//|@|serviceaccount:[^:\"]+:)muster-(accounts|admin|closed|console|critical-pods|fuse|gate|health|keys|labeler|metrics|nats|notifier|plugin|reader)" -}}
{{- /* labels say what a pod is, whatever its name; the audience of tokens is the gate's own */ -}}
{{- $text = regexReplaceAll $named $text (printf "${1}%s-${2}" $fullname)
  | replace (printf "app.kubernetes.io/name\":\"%s-" $fullname) "app.kubernetes.io/name\":\"muster-"
  | replace (printf "\"audience\":\"%s-nats\"" $fullname) "\"audience\":\"muster-nats\"" -}}
{{- end -}}
{{- with .root.Values.kubelet.directory | trimSuffix "/" -}}
{{- if ne . "/var/lib/kubelet" -}}
{{- /* the kubelet keeps device-plugins where it is, whatever its --root-dir */ -}}
{{- $text = $text | replace "\"/var/lib/kubelet" (printf "%q" . | trimSuffix "\"")
  | replace (printf "\"hostPath\":{\"path\":\"%s/device-plugins\"" .) "\"hostPath\":{\"path\":\"/var/lib/kubelet/device-plugins\"" -}}
{{- end -}}
{{- end -}}
{{- $text -}}
{{- end -}}

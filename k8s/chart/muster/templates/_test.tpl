{{- define "muster.test" -}}
{{- /* prints what `helm test` runs: a pod with the rights of health, whose Deployment is .object, and one that asks for a device */ -}}
{{- $resources := include "muster.resources" .settings.settings.plugin | fromJsonArray -}}
{{- $namespace := include "muster.namespace" .root -}}
{{- $fullname := include "muster.fullname" .root -}}
{{- $spec := deepCopy .object.spec.template.spec -}}
{{- $main := omit (first $spec.containers) "ports" "livenessProbe" "readinessProbe" -}}
{{- $_ := set $main "name" "test" -}}
{{- $_ := set $main "args" (list "muster.cli.verify_installation") -}}
{{- with $resources }}{{ $_ := set $main "args" (append $main.args (first .)) }}{{ end -}}
{{- $_ := set $main "env" (concat $main.env (list
  (dict "name" "NATS_URL" "value" "$(MUSTER_HEALTH__BUS__URL)")
  (dict "name" "NAMESPACE" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.namespace")))
)) -}}
{{- $_ := set $spec "containers" (list $main) -}}
{{- $_ := set $spec "restartPolicy" "Never" -}}
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ $fullname }}-test
  namespace: {{ $namespace }}
  labels: {app.kubernetes.io/name: muster-test, app.kubernetes.io/part-of: muster}
  annotations: {helm.sh/hook: test, helm.sh/hook-weight: "1", helm.sh/hook-delete-policy: "before-hook-creation,hook-succeeded"}
spec:
  {{- omit $spec "topologySpreadConstraints" | toYaml | nindent 2 }}
{{- with $resources }}
---
# Helm waits for no Deployment: the pod above says whether this one got its device
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $fullname }}-test-device
  namespace: {{ $namespace }}
  labels: &device {app.kubernetes.io/name: muster-test-device, app.kubernetes.io/part-of: muster}
  annotations: {helm.sh/hook: test, helm.sh/hook-weight: "0", helm.sh/hook-delete-policy: "before-hook-creation,hook-succeeded"}
spec:
  selector: {matchLabels: {app.kubernetes.io/name: muster-test-device}}
  template:
    metadata: {labels: *device}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 1
      tolerations: [{operator: Exists}]
      {{- with $spec.imagePullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      securityContext: {{ toJson $spec.securityContext }}
      containers:
        - name: device
          image: {{ $main.image }}
          command: [/opt/venv/bin/python, -c, import signal; signal.pause()]
          resources:
            requests: {cpu: 10m, memory: 16Mi}
            limits: {memory: 64Mi, {{ first . | quote }}: 1}
          securityContext: {{ toJson $main.securityContext }}
{{- end }}
{{- end -}}

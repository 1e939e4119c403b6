{{- define "holdfast.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}
{{- define "holdfast.labels" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}
{{- define "holdfast.meta" -}}
name: {{ include "holdfast.name" .root }}-{{ .part }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "holdfast.labels" . | nindent 2 }}
  helm.sh/chart: holdfast-{{ .root.Chart.Version }}
{{- end }}
{{- define "holdfast.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}
{{- define "holdfast.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}
{{- define "holdfast.secret" -}}
- name: {{ .name }}
  valueFrom: { secretKeyRef: { name: {{ .root.Values.existingSecret }}, key: {{ .key | default .name }} } }
{{- end }}
{{- define "holdfast.settings" -}}
{{- range $name, $value := . }}
- { name: {{ $name }}, value: {{ $value | toString | quote }} }
{{- end }}
{{- end }}
{{- define "holdfast.pull" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{ range . }}
  - name: {{ . }}{{ end }}
{{- end }}
{{- end }}
{{- define "holdfast.enginePort" -}}{{ eq .Values.engine.kind "vllm" | ternary 8000 8100 }}{{- end }}
{{- define "holdfast.engines" -}}
{{- if eq .Values.engine.kind "none" }}{{ required "engine.urls: needed where engine.kind is none" .Values.engine.urls }}
{{- else }}kubernetes://{{ .Release.Namespace }}/{{ include "holdfast.name" . }}-engine:http{{ eq .Values.engine.kind "vllm" | ternary "/holdfast" "" }}
{{- end }}
{{- end }}

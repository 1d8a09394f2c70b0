{{- define "autotune.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The user of the Dockerfile. */}}
{{- define "autotune.user" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "autotune.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "autotune.labels" -}}
app.kubernetes.io/name: bagua-autotune
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* By digest where that is given; the tag then only tells a reader which release it is. */}}
{{- define "autotune.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if and (eq $tag "latest") (not .Values.image.digest) -}}
{{- fail "image.tag: latest is another image from one day to the next; name a version, or set image.digest" -}}
{{- end -}}
{{- .Values.image.repository }}:{{ $tag }}{{ with .Values.image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- define "autotune.secret" -}}
{{- if .Values.secret.existing -}}
{{- .Values.secret.existing -}}
{{- else if .Values.secret.token -}}
{{- include "autotune.name" . -}}
{{- else -}}
{{- fail "the service listens on a network, so it needs a token: set secret.existing to the name of a Secret with the key token, or secret.token" -}}
{{- end -}}
{{- end -}}

{{/* What the pods read of the Secret, empty if that is not known: a Secret of one's own is looked up in
the cluster, which `helm template` does not. */}}
{{- define "autotune.secretData" -}}
{{- if .Values.secret.existing -}}
{{- with lookup "v1" "Secret" .Release.Namespace .Values.secret.existing -}}
{{- .data | toJson -}}
{{- end -}}
{{- else -}}
{{- .Values.secret | toJson -}}
{{- end -}}
{{- end -}}

{{/* Not empty if SQLite's file is on a volume that stays. */}}
{{- define "autotune.isPersistent" -}}
{{- if and .Values.persistence.enabled (not .Values.secret.database) -}}
{{- if gt (int .Values.replicas) 1 -}}
{{- fail "several replicas share a PostgreSQL database: set secret.database, or put its URL into secret.existing as the key database and set persistence.enabled to false" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{- define "relay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "relay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "relay.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "relay.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Labels that select pods: they never change over the life of a release. */ -}}
{{- define "relay.selector" -}}
app.kubernetes.io/name: {{ include "relay.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "relay.labels" -}}
{{ include "relay.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "relay.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "relay.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create -}}
{{ include "relay.fullname" .root }}-{{ .component }}
{{- else -}}
{{ .root.Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "relay.databaseUrl" -}}
{{- if .Values.trialPostgres.enabled -}}
postgres://relay:{{ .Values.trialPostgres.password }}@{{ .Release.Name }}-trial-postgres:5432/relay
{{- else -}}
{{ .Values.database.url }}
{{- end -}}
{{- end -}}

{{- /* URL of NATS with the user of a component. */ -}}
{{- define "relay.natsUrl" -}}
{{- with .root -}}
{{- if .Values.trialNats.enabled -}}
nats://relay-{{ $.component }}:{{ .Values.trialNats.password }}@{{ .Release.Name }}-trial-nats:4222
{{- else if and (eq $.component "worker") .Values.nats.workerUrl -}}
{{ .Values.nats.workerUrl }}
{{- else -}}
{{ .Values.nats.url }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "relay.streamReplicas" -}}
{{- if .Values.trialNats.enabled -}}
{{ .Values.trialNats.replicas }}
{{- else -}}
{{ .Values.nats.streamReplicas }}
{{- end -}}
{{- end -}}

{{- define "relay.migrateMode" -}}
{{- if and (eq .Values.migrate.mode "hook") .Values.trialPostgres.enabled -}}
init
{{- else -}}
{{ .Values.migrate.mode }}
{{- end -}}
{{- end -}}

{{- /* Port of a URL: the one after its host, which may be an IPv6 literal in brackets, or else its scheme's. */ -}}
{{- define "relay.urlPort" -}}
{{- $url := urlParse . -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{- /* Invalid combinations are refused before anything is created. */ -}}
{{- define "relay.check" -}}
{{- $v := .Values -}}
{{- $databases := 0 -}}
{{- if $v.database.url }}{{ $databases = add1 $databases }}{{ end -}}
{{- if $v.database.existingSecret }}{{ $databases = add1 $databases }}{{ end -}}
{{- if $v.trialPostgres.enabled }}{{ $databases = add1 $databases }}{{ end -}}
{{- if ne (int $databases) 1 -}}
{{- fail "give exactly one of database.url, database.existingSecret and trialPostgres.enabled" -}}
{{- end -}}
{{- $streams := 0 -}}
{{- if $v.nats.url }}{{ $streams = add1 $streams }}{{ end -}}
{{- if $v.nats.existingSecret }}{{ $streams = add1 $streams }}{{ end -}}
{{- if $v.trialNats.enabled }}{{ $streams = add1 $streams }}{{ end -}}
{{- if ne (int $streams) 1 -}}
{{- fail "give exactly one of nats.url, nats.existingSecret and trialNats.enabled" -}}
{{- end -}}
{{- if lt (int $v.gateway.terminationGracePeriodSeconds) (add (int $v.gateway.preStopSeconds) 30 | int) -}}
{{- fail "gateway.terminationGracePeriodSeconds must be at least gateway.preStopSeconds + 30, or drains are cut short" -}}
{{- end -}}
{{- if and $v.database.existingSecretDirectKey (not $v.database.existingSecret) -}}
{{- fail "database.existingSecretDirectKey needs database.existingSecret" -}}
{{- end -}}
{{- if and $v.files.s3.bucket $v.files.existingClaim -}}
{{- fail "files are kept in files.s3.bucket or in files.existingClaim, not in both" -}}
{{- end -}}
{{- if ne (empty $v.files.s3.accessKeyId) (empty $v.files.s3.secretAccessKey) -}}
{{- fail "files.s3.accessKeyId and files.s3.secretAccessKey go together" -}}
{{- end -}}
{{- if and $v.secrets.existingSecret (or $v.push.proxyAuth $v.files.s3.accessKeyId) -}}
{{- fail "with secrets.existingSecret, push.proxyAuth and files.s3.accessKeyId and secretAccessKey are not used: put RELAY_PUSH_PROXY_AUTH, RELAY_FILES_S3_ACCESS_KEY_ID and RELAY_FILES_S3_SECRET_ACCESS_KEY into that Secret" -}}
{{- end -}}
{{- if ne (empty $v.config.operator.issuer) (empty $v.config.operator.audience) -}}
{{- fail "config.operator.issuer and config.operator.audience go together" -}}
{{- end -}}
{{- if and $v.config.hosted (not (or $v.config.operator.issuer $v.secrets.bootstrapSecret $v.secrets.existingSecret)) -}}
{{- fail "config.hosted needs operators: secrets.bootstrapSecret, secrets.existingSecret or config.operator" -}}
{{- end -}}
{{- if and $v.gateway.autoscaling.enabled (not (or $v.gateway.autoscaling.targetCpuPercent $v.gateway.autoscaling.targetConnectedNodes)) -}}
{{- fail "gateway.autoscaling needs targetCpuPercent or targetConnectedNodes" -}}
{{- end -}}
{{- end -}}

{{- /* The same for all containers of the engine. */ -}}
{{- define "relay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "relay.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "relay.env.database" -}}
- name: DATABASE_URL
  valueFrom:
    secretKeyRef:
      {{- if .Values.database.existingSecret }}
      name: {{ .Values.database.existingSecret }}
      key: {{ .Values.database.existingSecretKey }}
      {{- else }}
      name: {{ include "relay.fullname" . }}
      key: DATABASE_URL
      {{- end }}
{{- include "relay.env.pooler" . }}
{{- end -}}

{{- /* Nothing, unless DATABASE_URL leads to a pooler. */ -}}
{{- define "relay.env.pooler" -}}
{{- with .Values.database.existingSecretDirectKey }}
- name: DATABASE_DIRECT_URL
  valueFrom:
    secretKeyRef:
      name: {{ $.Values.database.existingSecret }}
      key: {{ . }}
- name: RELAY_DATABASE_POOLER
  value: transaction
{{- end }}
{{- end -}}

{{- define "relay.env" -}}
{{- $component := .component -}}
{{- with .root -}}
{{ include "relay.env.database" . }}
- name: NATS_URL
  valueFrom:
    secretKeyRef:
      {{- if .Values.nats.existingSecret }}
      name: {{ .Values.nats.existingSecret }}
      key: {{ ternary .Values.nats.existingSecretWorkerKey .Values.nats.existingSecretKey (and (eq $component "worker") (ne .Values.nats.existingSecretWorkerKey "")) }}
      {{- else }}
      name: {{ include "relay.fullname" . }}
      key: {{ ternary "NATS_URL_WORKER" "NATS_URL" (eq $component "worker") }}
      {{- end }}
{{- if .Values.nats.caSecret }}
- name: RELAY_NATS_CA_FILE
  value: /etc/relay/nats-ca/ca.crt
{{- end }}
{{- $root := . }}
{{- with .Values.secrets.existingSecret }}
{{- range tuple "RELAY_SIGNING_SECRET" "RELAY_BOOTSTRAP_SECRET" "RELAY_SECRET_KEYS" "RELAY_PUSH_PROXY_AUTH" "RELAY_FILES_S3_ACCESS_KEY_ID" "RELAY_FILES_S3_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $root.Values.secrets.existingSecret }}
      key: {{ . }}
      optional: true
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "relay.envFrom" -}}
- configMapRef:
    name: {{ include "relay.fullname" . }}
{{- if not .Values.secrets.existingSecret }}
- secretRef:
    name: {{ include "relay.fullname" . }}-keys
{{- end }}
{{- end -}}

{{- define "relay.checksums" -}}
checksum/config: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
checksum/secret: {{ include (print .Template.BasePath "/secret.yaml") . | sha256sum }}
{{- end -}}

{{- /* Authorities of the servers' certificates. */ -}}
{{- define "relay.authorityVolumes" -}}
{{- with .Values.database.caSecret }}
- name: database-ca
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.nats.caSecret }}
- name: nats-ca
  secret:
    secretName: {{ . }}
{{- end }}
{{- end -}}

{{- define "relay.volumes" -}}
- name: tmp
  emptyDir: {}
{{- include "relay.authorityVolumes" . }}
{{- if not .Values.files.s3.bucket }}
- name: files
  {{- if .Values.files.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.files.existingClaim }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "relay.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .Values.database.caSecret }}
- name: database-ca
  mountPath: /etc/relay/database-ca
  readOnly: true
{{- end }}
{{- if .Values.nats.caSecret }}
- name: nats-ca
  mountPath: /etc/relay/nats-ca
  readOnly: true
{{- end }}
{{- if not .Values.files.s3.bucket }}
- name: files
  mountPath: /var/lib/relay/files
{{- end }}
{{- end -}}

{{- define "relay.migrateContainer" -}}
name: migrate
image: {{ include "relay.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [/usr/bin/relayctl]
args: [migrate, --wait-seconds, {{ .Values.migrate.waitSeconds | quote }}]
securityContext:
  {{- include "relay.containerSecurity" . | nindent 2 }}
resources:
  {{- toYaml .Values.migrate.resources | nindent 2 }}
{{- if .Values.database.caSecret }}
volumeMounts:
  - name: database-ca
    mountPath: /etc/relay/database-ca
    readOnly: true
{{- end }}
{{- end -}}

{{- /* Placement of the pods of a component. */ -}}
{{- define "relay.placement" -}}
{{- $c := .values -}}
{{- with $c.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if $c.topologySpread }}
topologySpreadConstraints:
  {{- range tuple "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "relay.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

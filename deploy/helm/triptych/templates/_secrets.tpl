{{/* A value of a Secret: what the cluster has under `name` and `key`, else `length` random characters. */}}
{{- define "triptych.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if and $found (hasKey (default dict $found.data) .key) -}}
{{- index $found.data .key | b64dec -}}
{{- else -}}
{{- randAlphaNum .length -}}
{{- end -}}
{{- end }}

{{/* The roles that have a user in the store, and a password under their name in its Secret. */}}
{{- define "triptych.storeRoles" -}}
proxy encoder pd{{ if .root.Values.colocatedPools }} colocated{{ end }}{{ if include "triptych.vllmPools" . }} vllm{{ end -}}
{{- end }}

{{/* The store's users, with HASH-ROLE where the hash of a password belongs. */}}
{{- define "triptych.storeUsers" -}}
{{- $users := .root.Files.Get "files/users.acl" | trim -}}
{{- if .root.Values.colocatedPools -}}
{{- /* A replica does what an encoder and a PD worker do. */ -}}
{{- $rules := list -}}
{{- range $role := list "encoder" "pd" -}}
{{- $rules = append $rules (regexFind (printf "#HASH-%s .*" $role) $users | trimPrefix (printf "#HASH-%s " $role)) -}}
{{- end -}}
{{- $users = printf "%s\nuser triptych-colocated reset on #HASH-colocated %s" $users (join " " $rules) -}}
{{- end -}}
{{- if include "triptych.vllmPools" . -}}
{{- $users = printf "%s\n%s" $users (.root.Files.Get "files/user-vllm.acl" | trim) -}}
{{- end -}}
{{- $users -}}
{{- end }}

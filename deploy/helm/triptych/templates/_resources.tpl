{{/* Resources of containers. */}}

{{/* A quantity like 500m or 4Gi as a number. */}}
{{- define "triptych.quantity" -}}
{{- if kindIs "string" . -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- printf "%f" (mulf (float64 $number) (float64 (index $units (trimPrefix $number .)))) -}}
{{- else -}}
{{- printf "%f" (float64 .) -}}
{{- end -}}
{{- end }}

{{/* `resources` of a container that `where` names, refused where an API server would refuse them. */}}
{{- define "triptych.resources" -}}
{{- $where := .where -}}
{{- $limits := default dict .resources.limits -}}
{{- range $name, $request := default dict .resources.requests -}}
{{- $limit := get $limits $name -}}
{{- /* Devices and huge pages cannot be shared: a request is the limit. */ -}}
{{- if and (or (contains "/" $name) (hasPrefix "hugepages-" $name)) (ne (toString $request) (toString $limit)) -}}
{{- fail (printf "%s.resources: requests.%s is %v and limits.%s %q: give both the same amount" $where $name $request $name (toString $limit)) -}}
{{- end -}}
{{- if hasKey $limits $name -}}
{{- if gt (include "triptych.quantity" $request | float64) (include "triptych.quantity" $limit | float64) -}}
{{- fail (printf "%s.resources: requests.%s %v is above limits.%s %v, which may be a default that Helm has merged in: give limits.%s too" $where $name $request $name $limit $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml .resources -}}
{{- end }}

{{/* `resources` of a container in a pod of the class Guaranteed: what is requested is the limit. The kubelet's managers of
     CPUs and topology give such containers whole CPUs, and devices, of one NUMA node. */}}
{{- define "triptych.guaranteed" -}}
{{- $resources := deepCopy .resources -}}
{{- if .numa -}}
{{- $requests := default dict $resources.requests -}}
{{- $limits := default dict $resources.limits -}}
{{- range $name := list "cpu" "memory" -}}
{{- $amount := default (get $limits $name) (get $requests $name) -}}
{{- if not $amount }}{{ fail (printf "%s: numa needs requests.%s of every container" $.where $name) }}{{ end -}}
{{- $_ := set $requests $name $amount -}}
{{- $_ := set $limits $name $amount -}}
{{- end -}}
{{- $cpus := include "triptych.quantity" $requests.cpu | float64 -}}
{{- if and .whole (ne $cpus (floor $cpus)) -}}
{{- fail (printf "%s.resources: numa gives whole CPUs to a container that requests whole ones, and requests.cpu is %v: round it" .where $requests.cpu) -}}
{{- end -}}
{{- $_ := set $resources "requests" $requests -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* The security of a container that computes. RDMA pins memory, which takes a capability where the runtime limits it. */}}
{{- define "triptych.computeSecurity" -}}
{{- include "triptych.containerSecurity" . }}
{{- if dig "lockMemory" false (default dict .rdma) }}
  add: [IPC_LOCK]
{{- end }}
{{- end }}

{{/* `resources` with a GPU for each of `ranks` where the device is one, unless they name some already. */}}
{{- define "triptych.gpuResources" -}}
{{- $resources := include "triptych.guaranteed" (dict "resources" .resources "numa" .spec.numa "where" .where "whole" true) | fromYaml -}}
{{- with .spec.rdma -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits .resource (toString (default 1 .count)) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- if hasPrefix "cuda" .spec.device -}}
{{- $limits := default dict $resources.limits -}}
{{- if not (hasKey $limits .spec.gpuResource) }}{{ $_ := set $limits .spec.gpuResource (toString .ranks) }}{{ end -}}
{{- $given := get $limits .spec.gpuResource | toString | int -}}
{{- if lt $given .ranks -}}
{{- fail (printf "%s.resources: limits.%s is %d and the worker has %d ranks, with a GPU each: leave it out, or give it %d" .where .spec.gpuResource $given .ranks .ranks) -}}
{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- include "triptych.resources" (dict "where" .where "resources" $resources) -}}
{{- end }}

{{/* A worker's resources; those of one in front of vLLM have no GPU. */}}
{{- define "triptych.workerResources" -}}
{{- $where := printf "%sPools.%s" .component .pool -}}
{{- if include "triptych.onVllm" . -}}
{{- $own := include "triptych.guaranteed" (dict "resources" .spec.resources "numa" .spec.numa "where" $where) | fromYaml -}}
{{- include "triptych.resources" (dict "where" $where "resources" $own) -}}
{{- else -}}
{{- include "triptych.gpuResources" (dict "where" $where "spec" .spec "resources" .spec.resources "ranks" (include "triptych.ranks" . | int)) -}}
{{- end -}}
{{- end }}

{{/* The store's resources. Its memory holds, beside the values, buffers of replies on their way, fragmentation and the
     server itself. */}}
{{- define "triptych.storeResources" -}}
{{- $bytes := include "triptych.bytes" .maxMemory | int64 -}}
{{- $needed := add $bytes (div $bytes 4) 268435456 | toString -}}
{{- $resources := deepCopy .resources -}}
{{- $requests := default dict $resources.requests -}}
{{- $limits := default dict $resources.limits -}}
{{- if not (hasKey $limits "memory") -}}
{{- $request := include "triptych.quantity" (default $needed $requests.memory) | float64 -}}
{{- $_ := set $limits "memory" (ternary $requests.memory $needed (gt $request (float64 $needed))) -}}
{{- end -}}
{{- if not (hasKey $requests "memory") }}{{ $_ := set $requests "memory" $limits.memory }}{{ end -}}
{{- if lt (include "triptych.quantity" $limits.memory | float64) (float64 $needed) -}}
{{- fail (printf "store.resources: limits.memory %v is below the %s bytes that store.maxMemory %s needs: raise the limit, or lower store.maxMemory" $limits.memory $needed .maxMemory) -}}
{{- end -}}
{{- $_ := set $resources "requests" $requests -}}
{{- $_ := set $resources "limits" $limits -}}
{{- include "triptych.resources" (dict "where" "store" "resources" $resources) -}}
{{- end }}

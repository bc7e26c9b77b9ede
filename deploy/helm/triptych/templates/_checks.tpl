{{/* The services drain for what is left of the grace period after the pause, less 15 s to end in. */}}
{{- define "triptych.checkGrace" -}}
{{- if lt (int .grace) (add (int .stop) 20 | int) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds is %d and preStopSeconds %d: at least 20 s must be left to drain" .where (int .grace) (int .stop)) -}}
{{- end -}}
{{- end }}

{{/* A rollout gives every request its time: the proxies' drain is longer than one, and a Gateway waits as long. */}}
{{- define "triptych.checkTimeouts" -}}
{{- $proxy := .Values.proxy -}}
{{- $drain := include "triptych.drainSeconds" $proxy | int -}}
{{- if ge (int $proxy.requestTimeout) $drain -}}
{{- fail (printf "proxy.requestTimeout is %d s, and a proxy drains for %d s: a rollout would cut streams; set proxy.terminationGracePeriodSeconds to %d or more, or lower proxy.requestTimeout" (int $proxy.requestTimeout) $drain (add $proxy.requestTimeout $proxy.preStopSeconds 16)) -}}
{{- end -}}
{{- $timeout := .Values.gatewayApi.requestTimeout -}}
{{- $unit := regexFind "[a-z]+$" $timeout -}}
{{- $seconds := mulf (float64 (trimSuffix $unit $timeout)) (float64 (index (dict "ms" 0.001 "s" 1 "m" 60 "h" 3600) $unit)) -}}
{{- /* 0s switches a route's timeout off. */ -}}
{{- if and .Values.gatewayApi.enabled $seconds (lt $seconds (float64 $proxy.requestTimeout)) -}}
{{- fail (printf "gatewayApi.requestTimeout is %s and proxy.requestTimeout %d s: the Gateway would cut streams; raise it to %ds or more" $timeout (int $proxy.requestTimeout) (int $proxy.requestTimeout)) -}}
{{- end -}}
{{- end }}

{{/* Flags that the templates set stand in no `args`: the second one would win over what other objects rely on. A worker's
     drain may be shorter than its pod's grace period. */}}
{{- define "triptych.checkArgs" -}}
{{- $set := splitList " " "--advertise --allowed-hosts --api-key-file --device --ec-store-rows --ec-transfer-port --encoder-data-parallel --encoder-slo --engine --engine-class --engine-url --grpc-port --host --http-cert-file --http-key-file --insecure --internal-token-file --kv-connector --linear-kernel --lora-modules --log-format --log-level --max-decode-seconds --max-encoders --max-pd-workers --media-disk --metrics-port --min-encoders --min-pd-workers --model-revision --no-auth --otlp-endpoint --port --prefill-threshold --proxy-protocol --request-timeout --role --scale --scale-window --scaler-host --scaler-port --schemas --served-model-name --share-prefixes --spool-folder --store --store-ca-file --store-cert-file --store-key-file --store-password-file --store-wait --tensor-parallel --tls-ca-file --tls-cert-file --tls-key-file --trace-sample --trusted-proxies --unknown-fields" -}}
{{- $where := .where -}}
{{- range $word := .args -}}
{{- $flag := first (splitList "=" $word) -}}
{{- if or (has $flag $set) (and (eq $where "proxy") (eq $flag "--drain-timeout")) -}}
{{- fail (printf "%s.args has %s, which the chart sets: change the value that it comes from, see the chart's README.md" $where $flag) -}}
{{- end -}}
{{- if regexMatch "^--[^ =]+ " $word -}}
{{- fail (printf "%s.args has %q, one word: write two, %s" $where $word (regexReplaceAll " +" $word " and ")) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Names of Services have no dots and begin with a letter; a release's name need not. */}}
{{- define "triptych.checkName" -}}
{{- $name := include "triptych.fullname" (dict "root" .) -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $name) -}}
{{- fail (printf "%q would begin the names of Services, which have lower-case letters, digits and dashes and begin with a letter: set fullnameOverride" $name) -}}
{{- end -}}
{{- end }}

{{/* Labels that selectors or the chart's own labels have stand in no values: one object cannot have two of a name. */}}
{{- define "triptych.checkLabels" -}}
{{- range $name, $_ := include "triptych.labels" (dict "root" (dict "Values" dict "Release" .root.Release "Chart" .root.Chart) "component" "x" "pool" "x") | fromYaml -}}
{{- if hasKey (default dict $.labels) $name -}}
{{- fail (printf "%s has %s, a label of the chart's own: take it out, or give yours another name" $.where $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* /dev/shm is memory of the container that fills it: the kernel ends one whose limit is less. */}}
{{- define "triptych.checkShm" -}}
{{- $resources := ternary (dig "vllm" "resources" dict .spec) .spec.resources (not (empty (include "triptych.onVllm" .))) -}}
{{- $limit := dig "limits" "memory" "" $resources -}}
{{- $size := include "triptych.shmSize" . -}}
{{- if and $limit (ge (include "triptych.quantity" $size | float64) (include "triptych.quantity" $limit | float64)) -}}
{{- fail (printf "%sPools.%s: /dev/shm of %s (shmSize, vllm.hostMemory) counts as memory, and limits.memory of the container is %v: raise the limit, or lower the size" .component .pool $size $limit) -}}
{{- end -}}
{{- end }}

{{/* What another source of the checkpoint needs is not given beside the demo model, which would be served under its name. */}}
{{- define "triptych.checkModelSource" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "demo" -}}
{{- $given := dict "pvc.existingClaim" $model.pvc.existingClaim "download.id" $model.download.id "image.reference" $model.image.reference "container.image" $model.container.image -}}
{{- range $name, $value := $given -}}
{{- if $value -}}
{{- fail (printf "model.source is demo, and model.%s is given: set model.source to %s, or take it out" $name (first (splitList "." $name))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A claim that the chart makes is mounted by pods of several nodes, or by one pod alone. */}}
{{- define "triptych.checkModelClaim" -}}
{{- $model := .Values.model -}}
{{- if and (has $model.source (list "pvc" "download")) (not $model.pvc.existingClaim) -}}
{{- if has "ReadWriteMany" $model.pvc.accessModes -}}
{{- if not $model.pvc.storageClass -}}
{{- fail "model.pvc.accessModes has ReadWriteMany and model.pvc.storageClass is empty: default classes make disks (EBS, Persistent Disk, Azure Disk), which refuse it; name a class of a shared file system (EFS, Filestore, Azure Files, CephFS, NFS), or give model.pvc.existingClaim" -}}
{{- end -}}
{{- else if eq $model.source "pvc" -}}
{{- fail "model.source is pvc, and a claim of model.pvc.accessModes ReadWriteOnce is one node's: give model.pvc.existingClaim, or ReadWriteMany with a model.pvc.storageClass of a shared file system; model.source download gives each pod a disk of its own" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Which user of the store a service is, and with which password. */}}
{{- define "triptych.checkStore" -}}
{{- $store := .Values.store -}}
{{- if and (eq $store.mode "valkey") (not $store.acl) -}}
{{- fail "store.acl is false and store.mode is valkey: the chart's own servers have a user for each role, and the default one is off; set store.acl to true, or store.mode to external" -}}
{{- end -}}
{{- $secret := dig "name" "" $store.external.urlSecret -}}
{{- if and (eq $store.mode "valkey") (or $store.external.url $secret) -}}
{{- fail "store.mode is valkey, and store.external says where a store of yours is: set store.mode to external, or take it out" -}}
{{- end -}}
{{- if eq $store.mode "external" -}}
{{- if and (not $store.external.url) (not $secret) -}}
{{- fail "store.mode is external: give store.external.url, or store.external.urlSecret with the Secret that has the URL" -}}
{{- end -}}
{{- if and $store.external.url $secret -}}
{{- fail "store.external.url and store.external.urlSecret are both set: leave one of them out" -}}
{{- end -}}
{{- if regexMatch "://[^/@,]*:[^/@,]*@" $store.external.url -}}
{{- fail "store.external.url has a password, which command lines would show: leave it out, and give store.existingSecret" -}}
{{- end -}}
{{- if and (contains "@" $store.external.url) $store.acl $store.existingSecret -}}
{{- fail "store.external.url names a user, and with store.acl each role logs in as its own: leave the user out, or set store.acl to false" -}}
{{- end -}}
{{- if and $secret $store.acl $store.existingSecret -}}
{{- fail "store.external.urlSecret and store.existingSecret with store.acl: one URL cannot name the user of each role; give store.external.url, or set store.acl to false" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What a pool in front of vLLM needs: an image with vLLM, a checkpoint that it reads, and encoders of the same dtype. */}}
{{- define "triptych.checkVllm" -}}
{{- $where := printf "pdPools.%s" .pool.name -}}
{{- if not .vllm.image -}}
{{- fail (printf "%s: engine is vllm and vllm.image is empty: give an image of vLLM with triptych in it, see docs/kubernetes.md" $where) -}}
{{- end -}}
{{- if eq .values.model.source "demo" -}}
{{- fail (printf "%s: engine is vllm and model.source is demo: vLLM does not have the demo model; set model.source" $where) -}}
{{- end -}}
{{- if and (eq .values.store.mode "external") (not .values.store.external.url) -}}
{{- fail (printf "%s: engine is vllm and the store's URL comes from a Secret: give store.external.url without its password, and the password by store.existingSecret" $where) -}}
{{- end -}}
{{- $dtype := printf "--dtype %s" .vllm.dtype -}}
{{- $root := dict "Values" .values -}}
{{- $model := include "triptych.modelName" (dict "root" $root "spec" (dict "model" (default .values.pd.model .pool.model))) -}}
{{- range $encoder := .values.encoderPools -}}
{{- $own := dict "model" (default $.values.encoder.model $encoder.model) -}}
{{- $same := eq $model (include "triptych.modelName" (dict "root" $root "spec" $own)) -}}
{{- if and $same (not (contains $dtype (join " " (ternary $encoder.args $.values.encoder.args (hasKey $encoder "args")) | replace "--dtype=" "--dtype "))) -}}
{{- fail (printf "encoderPools.%s: args have no %q: encoders save what vLLM reads, which computes in vllm.dtype" $encoder.name $dtype) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A pod's ports differ from each other, and on the network of a node from those of every other pod there. */}}
{{- define "triptych.checkPorts" -}}
{{- $values := .Values -}}
{{- $taken := dict -}}
{{- range $kind := list "encoder" "pd" "colocated" -}}
{{- $defaults := ternary $values.encoder $values.pd (eq $kind "encoder") -}}
{{- range $pool := index $values (printf "%sPools" $kind) -}}
{{- $engine := default $defaults.engine $pool.engine -}}
{{- $where := printf "%sPools.%s" $kind $pool.name -}}
{{- $names := list "grpc" "metrics" -}}
{{- if ne $kind "pd" }}{{ $names = append $names "embeddings" }}{{ end -}}
{{- if and (eq $kind "pd") (eq $engine "vllm") }}{{ $names = append $names "engine" }}{{ end -}}
{{- $own := list -}}
{{- range $name := $names -}}
{{- $port := include "triptych.port" (dict "spec" (dict "ports" (default $defaults.ports $pool.ports)) "name" $name) -}}
{{- if has $port $own -}}
{{- fail (printf "%s.ports has %s twice: every port of a pod is one server's" $where $port) -}}
{{- end -}}
{{- $own = append $own $port -}}
{{- if ternary $pool.hostNetwork $defaults.hostNetwork (hasKey $pool "hostNetwork") -}}
{{- $place := printf "%s %s" $port (toJson (default dict (default $defaults.nodeSelector $pool.nodeSelector))) -}}
{{- with get $taken $place -}}
{{- fail (printf "%s: hostNetwork with port %s, which %s has on the same nodes: give ports of its own, or another nodeSelector" $where $port .) -}}
{{- end -}}
{{- $_ := set $taken $place $where -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

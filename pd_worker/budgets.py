"""The budgets of a PD worker."""

from __future__ import annotations

from triptych.base.budgets import SharedBudget
from triptych.pd_worker.server import LARGE_MESSAGE, MAX_QUERIES, MAX_WAITING
from triptych.pd_worker.worker import INPUT_THREADS

BUDGETS: tuple[SharedBudget, ...] = (
    SharedBudget(
        "requests",
        "requests that are not finished",
        f"{MAX_WAITING} beyond `--max-num-seqs`",
        "share",
        "429: an equal part for each tenant once all are taken, then elsewhere or later",
        made=("server.py: Overloaded",),
    ),
    SharedBudget(
        "input threads",
        "prompts rendered, tokenised and checked at once",
        f"{INPUT_THREADS} threads, one of them for messages of up to {LARGE_MESSAGE >> 10} KiB, of which one "
        "tenant beside others has one",
        "turns",
        "they wait",
        made=("worker.py: ThreadPoolExecutor",),
    ),
    SharedBudget(
        "queries",
        "questions of `/tokenize`, `/detokenize` and counts that wait",
        f"{MAX_QUERIES}",
        "share",
        "429",
        made=("server.py: Overloaded",),
    ),
    SharedBudget(
        "query threads",
        "questions answered at once",
        f"{INPUT_THREADS} threads, one of them for messages of up to {LARGE_MESSAGE >> 10} KiB, of which one "
        "tenant beside others has one",
        "turns",
        "they wait",
        made=("worker.py: ThreadPoolExecutor",),
    ),
    SharedBudget(
        "slots",
        "requests that run at once",
        "",
        "turns",
        "they wait; a tenant without any in the batch gets the place of the tenant with the most",
        flag="--max-num-seqs",
    ),
    SharedBudget(
        "step tokens",
        "tokens of one step",
        "512 on a CPU, 8,192 on a GPU; half of it for prompts while others decode, a quarter beside other "
        "tenants where more takes above 20 ms",
        "turns",
        "prompts are prefilled in chunks",
        flag="--max-num-batched-tokens",
    ),
    SharedBudget(
        "KV blocks",
        "keys and values",
        "what `--device-memory` leaves",
        "turns",
        "the last request of the tenant with the most is preempted, and recomputed or swapped in later",
        flag="--kv-memory",
    ),
    SharedBudget(
        "item reservations",
        "embeddings of admitted requests",
        "an eighth of what is left beside the weights",
        "turns",
        "they wait for room, which another tenant's waiting ones give up for its first; "
        "one request's items that are larger: 400",
        flag="--encoder-cache-memory",
    ),
    SharedBudget(
        "recurrent states",
        "slots of recurrent layers, and snapshots",
        "a quarter of what is left for states and KV blocks",
        "turns",
        "they wait; the least recently used snapshot gives way",
        flag="--state-memory",
    ),
    SharedBudget(
        "swapped blocks",
        "host memory of preempted requests, with `--preemption swap`",
        "",
        "order",
        "a preempted request is recomputed",
        flag="--swap-memory",
    ),
    SharedBudget(
        "KV blocks on their way",
        "keys and values from and to the store, with `--share-prefixes`: half each way, 8 saves at once",
        "",
        "order",
        "blocks are not saved, and loads wait until their request computes",
        flag="--share-memory",
        made=("kv_sharing/transfers.py: Semaphore",),
    ),
    SharedBudget(
        "vLLM's copies",
        "items verified at once for a vLLM engine",
        "2",
        "order",
        "they wait",
        made=("vllm/calls.py: Semaphore",),
    ),
)
#: Flags with a bound's name that are limits of one request, or facts of the machine: by field, why.
NO_BUDGETS = {
    "device_memory": "what the others are taken from",
    "max_model_len": "of one request",
    "limit_mm_per_prompt": "of one request",
}

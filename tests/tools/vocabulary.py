"""Counter of vocabularies: types that tell the life of an encoder job or of a request, by the table below.

    python tests/tools/vocabulary.py

Every frozen class of a listed module, and every alternative of a listed oneof, counts for a life or stands
under "-": what is in neither, or is not there, is an error. So is a carrier that is not there, a class with a
field of plans that is neither a carrier nor named as beside the path, and a call that no earlier one makes.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB, PD = "encoder job", "PD request"
#: By module: the event types and instructions of each life; "-": classes that are none. "Message.oneof".
TYPES = {
    "encoder_worker/engine.py": {JOB: "Encoded", "-": "TowerItem _SaveOrder _TrialOrder _BatchOrder"},
    "encoder_worker/jobs/job.py": {},
    "protos/encoder.proto": {JOB: "EncodeEvent.body"},
    "proxy/ports.py": {"-": "ProcessEnd PDLoadReport"},
    "proxy/encoders/job.py": {"-": "PlanKey RunKey ItemSource EncoderSlot"},
    "proxy/requests/instructions.py": {
        JOB: "StartJobs TellJobs",
        "-": "LookUpItems Submit HandOver TakeOver KeepAttempt NotifyItems EndAttempt Emit Fail Leave"},
    "proxy/events.py": {
        "-": "Fetched LookedUp EncodersGone EncodersBack Accepted Refused FirstToken "
             "RequestFailed ClientLeft DeadlinePassed Ended CallEnded SuccessorSent SuccessorBegun"},
    "pd_worker/core/request_events.py": {},
    "triptych/base/delta.py": {PD: "Delta"},
    "protos/pd.proto": {PD: "RequestEvent.body"},
    "proxy/call/chat.py": {
        PD: "Done",
        "-": "EncoderPrompt Transcription ChatMessage PoolingOptions ChatCall ItemTiming"},
}  # fmt: skip
#: What carries the same data, in order: "module:Class", "module:Class.field" or "module.proto:Message"; with
#: "+" what holds the one before or after as it is.
CARRIERS = {
    "an item's plan": """triptych/models/base.py:PreparedItem triptych/base/types.py:ItemPlan
        protos/encoder.proto:EncodeEvent
        +proxy/requests/request_item.py:RequestItem.slot protos/pd.proto:ItemSlot
        triptych/base/types.py:MMFeature.plan""",
    "a request": """proxy/openai/chat/request.py:ChatBody proxy/call/chat.py:ChatCall
        +proxy/requests/request.py:InFlightRequest.call proxy/splitter.py:SplitRequest
        proxy/requests/request_item.py:RequestItem protos/pd.proto:SubmitRequest
        pd_worker/frontend/prompt.py:Prompt pd_worker/core/sampling.py:ResolvedSampling
        pd_worker/core/request.py:EngineRequest +pd_worker/core/request.py:RequestState.request
        +pd_worker/core/outputs.py:ScheduledChunk.state""",
}
#: Classes with plans, or their messages, that are not on the way from the encoder to the PD worker.
BESIDE = (
    "TowerItem EncodeJob EncoderJob ItemRecord LookedUp _CachedItem ItemUse CrossTable SwappedTable Group"
    " SavedValue"
)
#: The calls that an item's plan makes in the proxy, from its message to the PD worker's Submit.
CALLS = """encoders/encoder_client.py:EncodeStream.result encoders/job_runner.py:JobRunner._planned
    encoders/job_table.py:EncoderJobTable.planned encoders/job_table.py:EncoderJobTable._settle
    encoders/arrivals.py:ArrivedItems.resize encoders/job_runner.py:JobRunner._tell
    dispatcher.py:Dispatcher.deliver requests/lifecycle.py:Lifecycle.deliver
    requests/lifecycle.py:Lifecycle._of_job requests/lifecycle.py:Lifecycle._submit
    requests/recorder.py:Recorder.record pd/router.py:PDRouter.submit pd/choice.py:PDChoice.choose
    pd/router.py:PDRouter._send pd/router.py:PDRouter._hand_over pd/link.py:PDLink.submit"""
#: Product files, of which those that name these sampling fields are counted: what is generated is not.
PRODUCT = ("proxy", "encoder_worker", "pd_worker", "ec_connector", "protos", "triptych")
SAMPLING = re.compile(r"\b(min_p|repetition_penalty)\b")
#: Types of fields that hold a plan.
PLANS = re.compile(r"^(?!Callable).*\b(ItemPlan|EncodeEvent|ItemReady|ItemSlot)\b")


def classes(path: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fields(node: ast.ClassDef) -> dict[str, str]:
    noted = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return {ast.unparse(each.target): ast.unparse(each.annotation) for each in noted}


def frozen(node: ast.ClassDef) -> bool:
    return "frozen=True" in map(ast.unparse, node.keywords) or any(
        "frozen=True" in ast.unparse(each) for each in node.decorator_list
    )


def alternatives(path: str, name: str) -> list[str]:
    message, oneof = name.split(".")
    body = re.search(
        rf"^message {message} {{.*?oneof {oneof} {{(.*?)}}", (ROOT / path).read_text(), re.S | re.M
    )
    return re.findall(r"^ +\w+ (\w+) = \d+;", body[1] if body else "", re.M)


def types(life: str) -> dict[str, list[str]]:
    """The life's types by module; an error where the table and a module differ."""
    found = {}
    for path, named in TYPES.items():
        if path.endswith(".proto"):
            found[path] = [each for name in named.get(life, "").split() for each in alternatives(path, name)]
            assert found[path] or life not in named, f"{path} has no {named[life]}"
        else:
            there = {name for name, node in classes(path).items() if frozen(node)}
            differ = there ^ {*" ".join(named.values()).split()}
            assert not differ, f"{path} and the table differ in {differ}"
            found[path] = named.get(life, "").split()
    return {path: names for path, names in found.items() if names}


def check_carrier(carrier: str) -> None:
    path, name = carrier.strip("+").split(":")
    name, _, field = name.partition(".")
    if path.endswith(".proto"):
        assert f"message {name} {{" in (ROOT / path).read_text(), f"no {carrier}"
    else:
        assert not field or field in fields(classes(path)[name]), f"no {carrier}"


def check_plans() -> None:
    known = {*BESIDE.split(), *re.findall(r":(\w+)", CARRIERS["an item's plan"])}
    for path in [*ROOT.glob("proxy/**/*.py"), *ROOT.glob("*_worker/**/*.py")]:
        holders = {
            name for name, node in classes(str(path)).items() if any(map(PLANS.match, fields(node).values()))
        }
        assert holders <= known, f"{holders - known} hold plans, and are neither carriers nor beside the path"


def calls() -> list[tuple[str, int]]:
    """The class of each call, and how many calls it is inside of; an error where none before it names it."""
    made: list[tuple[str, int]] = []
    depths = {"result": 0}
    for call in CALLS.split():
        path, cls, method = re.split("[:.](?!py)", call)
        (body,) = (each for each in classes(f"proxy/{path}")[cls].body if getattr(each, "name", "") == method)
        assert method in depths, f"no call before {call} calls it"
        made.append((cls, depths[method]))
        names = (node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute))
        depths |= dict.fromkeys(names, depths[method] + 1)
    return made


def naming() -> list[str]:
    """The product files that name `min_p` or `repetition_penalty`; a link is its own path."""
    files = {path.resolve() for root in PRODUCT for path in (ROOT / root).rglob("*.py")}
    product = sorted(path for path in files if path.relative_to(ROOT).parts[0] in PRODUCT)
    named = (path for path in product if not path.stem.endswith(("_pb2", "_grpc")))
    return [str(path.relative_to(ROOT)) for path in named if SAMPLING.search(path.read_text())]


if __name__ == "__main__":
    for life in (JOB, PD):
        found = types(life)
        once = sum(1 if path.endswith(".proto") else len(names) for path, names in found.items())
        print(f"event types of {life}s: {sum(map(len, found.values()))} (a oneof as one: {once})", found)
    check_plans()
    for what, carriers in CARRIERS.items():
        for carrier in carriers.split():
            check_carrier(carrier)
        held = carriers.count("+")
        print(f"carriers of {what}: {len(carriers.split()) - held}, and {held} holders of one of them")
    made = calls()
    deepest = max(inside for _, inside in made) + 1
    counted = dict(Counter(cls for cls, _ in made))
    print(f"calls for a planned item in the proxy: {len(made)}, {deepest} inside one another", counted)
    print(f"product files that name min_p or repetition_penalty: {len(naming())}", naming())

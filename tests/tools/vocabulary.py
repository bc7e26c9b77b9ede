"""Counter of vocabularies: types that tell the life of an encoder job or of a request, by table.

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
#: By module: the event types and instructions of each life; "-": classes that are none.
TYPES = {
    "encoder_worker/engine.py": {JOB: "Encoded BatchDone Saved Unsaved Offered",
                                 "-": "TowerItem _SaveOrder _TrialOrder _BatchOrder"},
    "encoder_worker/jobs/job.py": {JOB: "Planned Ready MediaNeeded Failed Waits"},
    "protos/encoder.proto": {JOB: "EncodeEvent.body"},
    "proxy/ports.py": {JOB: "JobFailure", "-": "ProcessEnd PDLoadReport"},
    "proxy/encoders/job.py": {JOB: "StartPlan StartRun", "-": "PlanKey RunKey ItemSource EncoderSlot"},
    "proxy/requests/instructions.py": {
        JOB: "StartJobs AdmitJobs SkipJob ReturnShare",
        "-": "ResumeState LookUpItems Submit NotifyItems EndAttempt Emit Fail Leave"},
    "proxy/events.py": {
        JOB: "JobReady ItemPlanned JobRetried ItemReady JobFailed",
        PD: "Lost Admitted LoadReported MissReported Finished",
        "-": "JobsStarted Fetched LookedUp EncodersGone EncodersBack AttemptEvent Accepted Refused "
             "FirstToken RequestFailed ClientLeft DeadlinePassed Ended CallEnded"},
    "pd_worker/core/request_events.py": {
        PD: "RequestAdmitted ItemLoaded ItemMissing NewTokens RequestFinished", "-": "EngineEvent"},
    "protos/pd.proto": {PD: "RequestEvent.body"},
    "proxy/call/chat.py": {
        PD: "Started Delta Done",
        "-": "EncoderPrompt Transcription ChatMessage PoolingOptions ChatCall ItemTiming"},
}  # fmt: skip
#: What carries the same data, in order: "module:Class", "module:Class.field" or "module.proto:Message".
CARRIERS = {
    "an item's plan": """triptych/models/base.py:PreparedItem triptych/base/types.py:ItemPlan
        encoder_worker/jobs/job.py:Planned.plan protos/encoder.proto:EncodeEvent
        triptych/base/types.py:ItemPlan
        proxy/events.py:ItemPlanned.plan proxy/requests/lifecycle.py:RequestItem.plan protos/pd.proto:ItemSlot
        triptych/base/types.py:MMFeature.plan""",
    "a request": """proxy/openai/chat/request.py:ChatBody proxy/call/chat.py:ChatCall
        proxy/requests/request.py:InFlightRequest proxy/splitter.py:SplitRequest
        proxy/requests/lifecycle.py:RequestItem proxy/requests/instructions.py:Submit
        protos/pd.proto:SubmitRequest
        pd_worker/frontend/prompt.py:Prompt pd_worker/core/sampling.py:ResolvedSampling
        pd_worker/core/request.py:EngineRequest pd_worker/core/request.py:RequestState
        pd_worker/core/outputs.py:ScheduledChunk""",
}
#: Classes of the workers and the proxy with plans that are not on the way from the encoder to the PD worker.
BESIDE = """SwappedTable CrossTable ItemUse _CachedItem TowerItem EncodeJob Ready JobReady EncoderJob ItemRecord LookedUp"""
#: The calls that an item's plan makes in the proxy, from its message to the PD worker's Submit.
CALLS = """encoders/encoder_client.py:EncodeStream._handle encoders/job_runner.py:JobRunner._planned
    encoders/job_table.py:EncoderJobTable.planned encoders/job_table.py:EncoderJobTable._settle
    encoders/loads.py:ArrivedItems.resize encoders/job_runner.py:JobRunner._tell
    dispatcher.py:Dispatcher.deliver dispatcher.py:Dispatcher._step requests/recorder.py:Recorder.record
    requests/lifecycle.py:Lifecycle.deliver requests/lifecycle.py:Lifecycle._on_its_way
    requests/lifecycle.py:Lifecycle._planned requests/lifecycle.py:Lifecycle._submit
    dispatcher.py:Dispatcher._carry_out requests/recorder.py:Recorder.record pd/router.py:PDRouter.submit
    pd/router.py:PDRouter.pump pd/router.py:PDRouter._hand_out pd/router.py:PDRouter._choose
    pd/router.py:PDRouter._send pd/router.py:PDRouter._hand_over pd/link.py:PDLink.submit"""


def classes(path: str) -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def frozen(node: ast.ClassDef) -> bool:
    made_by = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    keywords = [*node.keywords, *(keyword for call in made_by for keyword in call.keywords)]
    return any(keyword.arg == "frozen" and getattr(keyword.value, "value", 0) is True for keyword in keywords)


def alternatives(path: str, name: str) -> list[str]:
    message, oneof = name.split(".")
    body = re.search(
        rf"^message {message} {{.*?oneof {oneof} {{(.*?)}}", (ROOT / path).read_text(), re.S | re.M
    )
    return re.findall(r"^\s*\w+ (\w+) = \d+;", body[1], re.M) if body else []


def events(life: str) -> dict[str, list[str]]:
    """The life's types by module; SystemExit where the table and a module differ."""
    found: dict[str, list[str]] = {}
    for path, named in TYPES.items():
        every = {name for names in named.values() for name in names.split()}
        if path.endswith(".proto"):
            found[path] = [each for name in named.get(life, "").split() for each in alternatives(path, name)]
            if life in named and not found[path]:
                raise SystemExit(f"{path} has no {named[life]}")
        else:
            there = {name for name, node in classes(path).items() if frozen(node)}
            if there != every:
                raise SystemExit(f"{path} and the table differ in {sorted(there ^ every)}")
            found[path] = named.get(life, "").split()
    return {path: names for path, names in found.items() if names}


def check_carrier(carrier: str) -> None:
    path, name = carrier.split(":")
    name, _, field = name.partition(".")
    if path.endswith(".proto"):
        there = f"message {name} {{" in (ROOT / path).read_text()
    else:
        node = classes(path).get(name)
        there = node is not None and (not field or field in {*fields(node)})
    if not there:
        raise SystemExit(f"no {carrier}")


def fields(node: ast.ClassDef) -> dict[str, str]:
    noted = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return {ast.unparse(each.target): ast.unparse(each.annotation) for each in noted}


def check_plans() -> None:
    known = {*BESIDE.split(), *re.findall(r":(\w+)", CARRIERS["an item's plan"])}
    for path in [*ROOT.glob("proxy/**/*.py"), *ROOT.glob("*_worker/**/*.py")]:
        for name, node in classes(str(path)).items():
            if name not in known and any("ItemPlan" in each for each in fields(node).values()):
                raise SystemExit(f"{name} holds plans, and is neither a carrier nor beside the path")


def calls() -> list[str]:
    """The names of the calls; SystemExit where one is not there or none before it names it."""
    named, names = {"_handle"}, []
    for call in CALLS.split():
        path, name = call.split(":")
        cls, method = name.split(".")
        body = [each for each in classes(f"proxy/{path}")[cls].body if getattr(each, "name", "") == method]
        if not body or method not in named:
            raise SystemExit(f"no {call}, or none before it calls it")
        named |= {node.attr for node in ast.walk(body[0]) if isinstance(node, ast.Attribute)}
        names.append(name)
    return names


if __name__ == "__main__":
    for life in (JOB, PD):
        found = events(life)
        once = sum(1 if path.endswith(".proto") else len(names) for path, names in found.items())
        print(f"event types of an {life}: {sum(map(len, found.values()))} (a oneof as one: {once})")
        for path, names in found.items():
            print(f"    {path}: {', '.join(names)}")
    check_plans()
    for what, path_of in CARRIERS.items():
        for carrier in path_of.split():
            check_carrier(carrier)
        print(f"carriers of {what}: {len(path_of.split())}")
    entered = Counter(name.partition(".")[0] for name in calls())
    print(f"calls for a planned item in the proxy: {entered.total()}, {dict(entered)}")

"""Options of vLLM's connector, and its requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace as Config
from typing import Any

import pytest
import torch

from triptych.base.config import ServiceConfig
from triptych.base.errors import ConfigError
from triptych.base.vllm_classes import CLASSES, NOT_SERVED
from triptych.integrations.vllm.engine import adopt_logging, check_engine, row_width, shares_a_process
from triptych.integrations.vllm.options import parse_options
from triptych.integrations.vllm.requests import ROWS, RequestItems, grid_of, needed_item, save_order
from triptych.store.topology.location import parse_store

NAMESPACE = "a1" * 32
NEEDED = {"store": "redis://store:6379/0", "namespace": NAMESPACE}


def test_a_store_and_a_namespace_are_enough():
    options = parse_options(NEEDED)
    assert options.store == "redis://store:6379/0"
    assert options.namespaces == (NAMESPACE,)
    assert (options.wait_seconds, options.media_wait_seconds, options.ttl_seconds) == (30.0, 1.0, 3600.0)
    assert (options.host_memory_bytes, options.host_folder, options.row_width) == (1 << 30, "/dev/shm", 0)


def test_every_option_can_be_set():
    options = parse_options(
        NEEDED
        | {
            "namespace": [NAMESPACE, "b2" * 32],
            "wait_seconds": 5,
            "media_wait_seconds": 0.5,
            "host_memory_bytes": 1 << 21,
            "host_folder": "/run/shm",
            "ttl_seconds": 60,
            "row_width": 1024,
            "ends_with_parent": True,
            "trusted_front_door": True,
        }
    )
    assert options.namespaces == (NAMESPACE, "b2" * 32)
    assert (options.wait_seconds, options.media_wait_seconds, options.ttl_seconds) == (5, 0.5, 60)
    assert (options.host_memory_bytes, options.host_folder, options.row_width) == (1 << 21, "/run/shm", 1024)
    assert options.trusted_front_door and not parse_options(NEEDED).trusted_front_door
    assert options.ends_with_parent and not parse_options(NEEDED).ends_with_parent


def test_the_clusters_token_comes_from_a_file_and_is_never_shown(tmp_path):
    file = tmp_path / "token"
    file.write_text("t" * 32 + "\n" + "u" * 32 + "\n")
    options = parse_options(NEEDED | {"internal_token_file": str(file)})
    assert options.token == "t" * 32 + "\n" + "u" * 32
    assert "t" * 32 not in repr(options) and not parse_options(NEEDED).token
    file.write_text("short")
    with pytest.raises(ConfigError, match="ec_connector_extra_config: --internal-token-file"):
        parse_options(NEEDED | {"internal_token_file": str(file)})


def test_certificates_of_services_go_together():
    files = {"tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "a", "tls_name": "triptych"}
    tls = parse_options(NEEDED | files).tls
    assert tls is not None and (tls.cert, tls.key, tls.ca, tls.name) == ("c", "k", "a", "triptych")
    assert parse_options(NEEDED).tls is None
    given = parse_options(NEEDED | {name: file for name, file in files.items() if name != "tls_name"})
    assert given.tls is not None and given.tls.name == ServiceConfig().tls_name
    for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
        some = {key: value for key, value in files.items() if key != name}
        with pytest.raises(ConfigError, match="go together"):
            parse_options(NEEDED | some)


def test_the_stores_password_comes_from_a_file_and_is_never_shown(tmp_path):
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    options = parse_options(NEEDED | {"store_password_file": str(file)})
    assert parse_store(options.store).servers[0].password == "s3cret"
    assert "s3cret" not in repr(options)


@pytest.mark.parametrize(
    "given,said",
    [
        ({"store": ""}, "no store: give the store's address"),
        ({"store": "http://store"}, "unsupported scheme"),
        ({"store": 5}, "store must be a text"),
        ({"namespace": "tiny"}, "64 hex characters"),
        ({"namespace": []}, "64 hex characters"),
        ({"namespace": None}, "64 hex characters"),
        ({"namespace": [NAMESPACE, 5]}, "64 hex characters"),
        ({"wait_seconds": -1}, "wait_seconds must be a number from 0"),
        ({"wait_seconds": "5"}, "wait_seconds must be a number"),
        ({"wait_seconds": float("nan")}, "wait_seconds must be a number"),
        ({"host_memory_bytes": 5}, "host_memory_bytes must be a number from"),
        ({"ttl_seconds": True}, "ttl_seconds must be a number"),
        ({"store_password_file": "/nowhere"}, "store_password_file /nowhere cannot be read"),
        ({"store_ca_file": "/nowhere"}, "ca_file|--store-ca-file"),
        (
            {"shared_storage_path": "/tmp"},
            "no option 'shared_storage_path': use store, store_file, namespace",
        ),
    ],
)
def test_a_bad_option_is_an_error_that_names_it(given, said):
    with pytest.raises(ConfigError, match=said) as raised:
        parse_options(NEEDED | given)
    assert str(raised.value).startswith("ec_connector_extra_config")


QWEN, SMOL = "Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration"


def config(**changed: Any) -> Config:
    parallel = {"nnodes": 1, "distributed_executor_backend": "uni", "world_size": 1}
    model: dict[str, Any] = {"is_encoder_decoder": False, "hf_config": Config(architectures=[QWEN])}
    multimodal = {"mm_processor_cache_type": "lru"}
    for given in (parallel, model, multimodal):
        given.update({name: value for name, value in changed.items() if name in given})
    return Config(
        parallel_config=Config(**parallel),
        model_config=Config(**model, multimodal_config=Config(**multimodal)),
    )


def test_an_ordinary_engine_is_accepted():
    check_engine(config(), is_consumer=True)
    check_engine(config(distributed_executor_backend="mp", world_size=8), is_consumer=True)


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"nnodes": 2}, "one vLLM instance per machine"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend mp or uni"),
        ({"mm_processor_cache_type": "shm"}, "--mm-processor-cache-type lru"),
        ({"is_encoder_decoder": True}, "`triptych pd`"),
    ],
)
def test_an_engine_that_could_not_be_fed_is_refused_with_the_remedy(changed, said):
    with pytest.raises(ConfigError, match=said):
        check_engine(config(**changed), is_consumer=True)


def test_an_engine_that_saves_what_untrusted_clients_name_is_refused_with_the_option():
    with pytest.raises(ConfigError, match="trusted_front_door"):
        check_engine(config(), is_consumer=False, is_producer=True)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_the_table_is_accepted_as_a_consumer(name):
    check_engine(config(hf_config=Config(architectures=[name])), is_consumer=True)


def test_a_class_that_is_not_in_the_table_is_refused_by_name_with_the_remedy():
    other = config(hf_config=Config(architectures=["FuyuForCausalLM"]))
    with pytest.raises(ConfigError, match=r"FuyuForCausalLM is not served through vLLM: use `triptych pd"):
        check_engine(other, is_consumer=True)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_class_that_vllm_ends_with_here_is_refused_with_its_own_words(name):
    other = config(hf_config=Config(architectures=[name]))
    with pytest.raises(ConfigError, match=rf"{name} is not served .* since vLLM 0\.32 .*\".+\".* native"):
        check_engine(other, is_consumer=True)
    check_engine(other, is_consumer=True, generic=True)


def test_a_class_that_is_not_in_the_table_is_tried_where_both_sides_say_so():
    other = config(hf_config=Config(architectures=["FuyuForCausalLM"]))
    check_engine(other, is_consumer=True, generic=True)
    with pytest.raises(ConfigError, match="ec_role to ec_consumer"):
        check_engine(other, is_consumer=True, is_producer=True, trusts_clients=True, generic=True)
    assert parse_options(NEEDED).engine_class == "known"
    assert parse_options(NEEDED | {"engine_class": "generic"}).engine_class == "generic"
    with pytest.raises(ConfigError, match="engine_class must be known or generic"):
        parse_options(NEEDED | {"engine_class": "any"})


@pytest.mark.parametrize("is_consumer", [True, False])
def test_a_producer_whose_plans_pd_workers_could_not_use_is_refused(is_consumer):
    smol = config(hf_config=Config(architectures=[SMOL]))
    with pytest.raises(ConfigError, match=f"saves of {SMOL} .* ec_role to ec_consumer"):
        check_engine(smol, is_consumer=is_consumer, is_producer=True, trusts_clients=True)


@pytest.mark.parametrize("changed", [{"nnodes": 2}, {"mm_processor_cache_type": "shm"}])
def test_an_engine_that_only_saves_may_be_on_several_machines(changed):
    check_engine(config(**changed), is_consumer=False)


@pytest.mark.parametrize(
    "backend,size,shared",
    [("uni", 1, True), (None, 1, True), ("external_launcher", 1, True), ("mp", 1, False), ("mp", 2, False)],
)
def test_workers_of_other_processes_get_their_copies_in_files(backend, size, shared):
    given = config(distributed_executor_backend=backend, world_size=size)
    assert shares_a_process(given) is shared


@pytest.mark.parametrize(
    "vision,width", [(Config(deepstack_visual_indexes=[5, 11, 17]), 8192), (Config(), 2048), (None, 2048)]
)
def test_deepstack_levels_widen_a_row(vision, width):
    model = Config(hf_config=Config(vision_config=vision), get_inputs_embeds_size=lambda: 2048)
    assert row_width(Config(model_config=model)) == width


def test_records_go_to_vllms_handlers():
    ours, theirs = logging.Logger("ours"), logging.Logger("theirs", logging.INFO)
    theirs.addHandler(logging.NullHandler())
    adopt_logging(ours, theirs)
    adopt_logging(ours, theirs)
    assert ours.handlers == theirs.handlers
    assert ours.level == logging.INFO
    assert not ours.propagate


KEY = "a" * 64
SIZES = {"image_grid_thw"}


@dataclass
class Place:
    offset: int
    length: int
    is_embed: Any = None

    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())


@dataclass
class Data:
    fields: dict[str, Any]

    def get_data(self) -> dict[str, Any]:
        return self.fields


@dataclass
class Feature:
    mm_position: Place
    data: Data | None = None
    modality: str = "image"
    identifier: str = KEY


@dataclass
class Request:
    mm_features: list[Feature]
    request_id: str = "r"
    ec_transfer_params: Any = None


def grid(*sizes: int) -> Data:
    return Data({"image_grid_thw": torch.tensor(sizes)})


def test_an_item_that_only_sizes_its_placeholder_has_no_media():
    item = needed_item(Feature(Place(3, 4), grid(1, 4, 4)), SIZES)
    assert (item.identifier, item.rows, item.has_media, item.grid) == (KEY, 4, False, (1, 4, 4))


def test_an_item_with_only_its_rows_or_a_grid_that_its_model_lacks_has_no_media():
    assert not needed_item(Feature(Place(3, 4), Data({ROWS: torch.tensor([4])})), set()).has_media
    assert not needed_item(Feature(Place(3, 4), grid(1, 4, 4)), set()).has_media


def test_an_item_with_pixels_has_media():
    data = Data(grid(1, 4, 4).fields | {"pixel_values": torch.zeros(16, 2)})
    assert needed_item(Feature(Place(3, 4), data), SIZES).has_media


def test_a_grid_is_read_whatever_its_shape():
    assert grid_of({"image_grid_thw": torch.tensor([[1, 2, 4]])}) == (1, 2, 4)
    assert grid_of({"video_grid_thw": torch.tensor([8, 2, 4])}) == (8, 2, 4)
    assert grid_of({"image_grid_thw": None}) == grid_of({}) == ()


def test_a_save_order_has_what_other_pd_workers_need_of_the_item():
    place = Place(3, 6, torch.tensor([False, True, True, False, True, False]))
    order = save_order(Feature(place, grid(1, 2, 6)))
    assert (order.identifier, order.modality, order.length, order.grid) == (KEY, "image", 6, (1, 2, 6))
    assert order.runs == ((1, 2), (4, 1))
    assert save_order(Feature(Place(3, 6))).runs is None


@dataclass
class Fields:
    asked: list[str] = field(default_factory=list)

    def __call__(self, modality: str) -> set[str]:
        self.asked.append(modality)
        return SIZES


def test_an_item_is_needed_until_its_last_token_is_computed():
    items = RequestItems(Fields())
    request = Request([Feature(Place(2, 4), identifier="first"), Feature(Place(10, 4), identifier="second")])
    needed = [[item.identifier for item in items.needed(request, done)] for done in (0, 5, 6, 13, 14)]
    assert needed == [["first", "second"], ["first", "second"], ["second"], ["second"], []]


def test_a_requests_items_are_read_once_until_it_grows_or_ends():
    fields = Fields()
    items = RequestItems(fields)
    request = Request([Feature(Place(2, 4))])
    for _ in range(3):
        items.needed(request, 0)
    assert len(fields.asked) == 1
    request.mm_features.append(Feature(Place(8, 4)))
    assert len(items.needed(request, 0)) == 2
    assert len(fields.asked) == 3
    items.finished(request.request_id)
    items.needed(request, 0)
    assert len(fields.asked) == 5

"""Chat templates: what they print, what they object to, and their format of tool calls."""

from __future__ import annotations

import json

import pytest

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.pd_worker.frontend.chat_template import ChatTemplate, read_template

STRINGS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


def user(content):
    return [{"role": "user", "content": content}]


def test_a_template_for_strings_gets_the_parts_joined():
    template = ChatTemplate(STRINGS)
    assert not template.takes_parts
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render(user(parts)) == "user: ab\n"


def test_a_template_for_strings_refuses_images():
    with pytest.raises(InvalidRequest, match="text only") as caught:
        ChatTemplate(STRINGS).render(user([{"type": "image"}]))
    assert caught.value.param == "messages"


def test_a_template_that_prints_its_list_is_one_for_strings():
    assert not ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").takes_parts


def test_what_a_template_objects_to_is_the_requests_error():
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="System role not supported") as caught:
        template.render([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_template_that_trips_is_the_requests_error():
    template = ChatTemplate("{{ 'a' + 1 if messages[0].role == 'tool' else messages[0].content }}")
    with pytest.raises(InvalidRequest, match="roles"):
        template.render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"]
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(InvalidRequest):
        text = ChatTemplate(source).render(user("x"))
        raise AssertionError(text)


def test_blocks_are_trimmed_as_transformers_does():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    assert ChatTemplate(source).render(user("x")) == "user\n"


def test_loop_controls_generation_blocks_and_json_work():
    source = (
        "{% for m in messages %}{% generation %}{{ m.role | tojson }}{% endgeneration %}{% break %}"
        "{% endfor %}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%%') }}"
    )
    assert ChatTemplate(source).render(user("x") * 2) == '"user"{"a": "<é>"}%'


def test_a_broken_template_is_a_config_error():
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% for %}")


def test_the_template_file_goes_before_the_tokenizers(tmp_path):
    assert read_template(tmp_path, "t") == "t"
    assert read_template(tmp_path, {"default": "d", "tool": "x"}) == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert read_template(tmp_path, "t") == "j"
    (tmp_path / "chat_template.jinja").write_text("f")
    assert read_template(tmp_path, "t") == "f"


def test_a_model_without_a_template_renders_nothing_and_names_what_it_serves(tmp_path):
    template = ChatTemplate(read_template(tmp_path, None))
    assert not template.takes_parts
    with pytest.raises(InvalidRequest, match=r"send a prompt to /v1/completions, or .* --chat-template"):
        template.render(user("x"))


#: A user's parts, a tool's content in three ways: by its parts, as it stands, and for strings only.
PARTS = (
    "{% macro parts(c) %}{% for p in c %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}"
    "{% endmacro %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'tool' %}TOOL{% else %}{{ parts(m.content) }}{% endif %}{% endfor %}"
)
TOOL_FORMS = {
    "parts": PARTS.replace("TOOL", "{{ parts(m.content) }}"),
    "as it stands": PARTS.replace("TOOL", "{{ m.content }}"),
    "strings": PARTS.replace("TOOL", "{{ m.content + '' }}"),
}
SHOT = [
    {"role": "user", "content": "see"},
    {"role": "tool", "content": [{"type": "text", "text": "a shot: "}, {"type": "image"}]},
]


def test_a_tools_content_comes_as_the_template_reads_it():
    for name, source in TOOL_FORMS.items():
        text = ChatTemplate(source).render([{"role": "tool", "content": "rain"}])
        assert text == "[tool]rain", name


def test_images_of_a_tool_go_to_templates_that_take_them_and_others_say_so():
    assert ChatTemplate(TOOL_FORMS["parts"]).render(SHOT) == "[user]see[tool]a shot: <image>"
    for name in ("as it stands", "strings"):
        with pytest.raises(InvalidRequest, match="send them in a user message") as caught:
            ChatTemplate(TOOL_FORMS[name]).render(SHOT)
        assert caught.value.param == "messages[1].content"

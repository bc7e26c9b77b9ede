"""Tool calls as each model family writes them, and what comes of them: whole, in pieces, and broken off."""

from __future__ import annotations

from triptych.pd_worker.frontend.chat_template import ChatTemplate

SCHEMAS = {
    "look": {
        "properties": {name: {"type": "string"} for name in ("at", "town", "code", "text", "a")}
        | {
            "times": {"type": "integer"},
            "deep": {"properties": {"list": {"items": {"properties": {"k": {"type": "array"}}}}}},
        }
    },
    "now": {},
}
#: How each family's template writes one call, of `f.name` and `f.arguments`; and what stands between calls.
SHAPES = {
    "hermes": (
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
        "\n",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "\n",
    ),
    "glm45": (
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
        "\n",
    ),
    "mistral": ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "gemma4": (
        '{%- macro value(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}'
        "{ {%- for k, w in v.items() -%}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%} }"
        "{%- elif v is sequence -%}[{%- for w in v -%}{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}]"
        "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
        "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>",
        "",
    ),
    "llama3_json": ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; "),
    "ernie45": (
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n'
        "{% if not f %}<response>{% endif %}",
        "",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ f.name }}:0<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
        "\n",
    ),
    "cohere_command3": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ f.name }}", '
        '"parameters": {{ f.arguments | tojson }}}\n]<|END_ACTION|>',
        "",
    ),
    "nemotron_json": (
        '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</TOOLCALL>',
        "\n",
    ),
    "hunyuan_a13b": (
        '<tool_calls>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</tool_calls>',
        "",
    ),
    "hy_v3": (
        "{% set mark = ':opensource' %}<tool_calls{{ mark }}>\n<tool_call{{ mark }}>{{ f.name }}"
        "<tool_sep{{ mark }}>\n{% for k, v in f.arguments.items() %}<arg_key{{ mark }}>{{ k }}"
        "</arg_key{{ mark }}>\n<arg_value{{ mark }}>{{ v if v is string else v | tojson }}"
        "</arg_value{{ mark }}>\n{% endfor %}</tool_call{{ mark }}>\n</tool_calls{{ mark }}>",
        "",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
        '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
        "</invoke>\n</minimax:tool_call>",
        "\n",
    ),
    "minimax_m3": (
        "{%- set mark = ']<]minimax[>[' -%}{%- macro value(v) -%}{%- if v is mapping -%}"
        "{%- for k, w in v.items() -%}{{ mark }}<{{ k }}>{{ value(w) }}{{ mark }}</{{ k }}>{%- endfor -%}"
        "{%- elif v is sequence and v is not string -%}"
        "{%- for w in v -%}{{ mark }}<item>{{ value(w) }}{{ mark }}</item>{%- endfor -%}"
        "{%- else -%}{{ v if v is string else v | tojson }}{%- endif -%}{%- endmacro -%}"
        '{{ mark }}<tool_call>\n{{ mark }}<invoke name="{{ f.name }}">{{ value(f.arguments) }}'
        "{{ mark }}</invoke>\n{{ mark }}</tool_call>",
        "\n",
    ),
    "step3": (
        "<\uff5ctool_calls_begin\uff5c>\n<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>"
        '<steptml:invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
        '<steptml:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</steptml:parameter>\n'
        "{% endfor %}</steptml:invoke><\uff5ctool_call_end\uff5c>\n<\uff5ctool_calls_end\uff5c>",
        "",
    ),
}
ARGUMENTS = [
    {},
    {"town": "Zürich"},
    {"code": "a\nb <tag> \"q\" 'p' \\n {x} [y]", "count": 3, "exact": -1.5e-3},
    {"deep": {"list": [1, "two", None, True, {"k": []}], "s": ""}, "flag": False},
    {"text": "line\r\n\ttab 你好 👩‍👩‍👧 </", "none": None},
]
LOOK = ("look", {"at": "12", "times": 3, "deep": {"a": [1, None, "é"]}})
NOW: tuple[str, dict[str, object]] = ("now", {})
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
SKY = ("look", {"at": "sky"})
NAMELESS = '<tool_call>{"name": "a}</tool_call>'
KIMI, HY, M3, BAR = "<|tool_calls_section_begin|>", "<tool_calls>", "]<]minimax[>[", "\uff5c"
STEP = f"<{BAR}tool_calls_begin{BAR}>\n<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>"
#: Outputs in which no call of Hermes is.
NO_CALLS = [
    *("hello\n", "<tool_call>", "<tool_call></tool_call>", "<tool_cal", " </tool_call> ", "a < b"),
    "<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arg',
    '<tool_call>{"name": "f}</tool_call> and more',
    "<tool_call>\\",
]
#: Outputs of other formats in which none is.
NO_OTHER_CALLS = [
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
    ("glm45", "<tool_call>not a name</tool_call>"),
    ("gemma4", "<|tool_call>look{}<tool_call|>"),
    ("mistral", "[TOOL_CALLS]look"),
    ("mistral", "a [TOOL] b"),
    ("llama3_json", '{"colour": "red"}'),
    ("llama3_json", 'It is {"name": "now"}.'),
    ("pythonic", "[look(at=open('x'))]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[look(1)]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[" * 4000),
    ("lfm2", "<|tool_call_start|>[1]<|tool_call_end|>"),
    ("kimi_k2", f"{KIMI}<|tool_calls_section_end|>"),
    ("kimi_k2", f"{KIMI}<|tool_call_begin|>f:0<|tool_call_end|>"),
    ("cohere_command3", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("hunyuan_a13b", "<tool_calls> are made"),
    ("hy_v3", f"{HY}</tool_calls>"),
    ("hunyuan_a13b", '<tool_callsx>{"name": "f"}</tool_callsx>'),
    ("minimax_m2", "<minimax:tool_call>x</minimax:tool_call>"),
    ("minimax_m3", f"{M3}<tool_call>{M3}</tool_call>"),
    ("step3", f"{STEP}thought"),
]
SPELLED = '{"at": "12", "times": 3, "deep": {"a": [1, null, "é"]}}'
#: Format, output, and what comes of it.
CASES = [
    *((name, text, [text]) for name, text in [*(("hermes", text) for text in NO_CALLS), *NO_OTHER_CALLS]),
    ("hermes", f"{CALL}\n{CALL}", [SKY, SKY]),
    ("hermes", f"{CALL}\nDone. ", [SKY, "Done. "]),
    ("hermes", f"a {CALL} b {CALL} c", ["a", SKY, "b", SKY, "c"]),
    ("hermes", CALL.removesuffix("</tool_call>"), [SKY]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', [NOW]),
    ("hermes", f"<tool_call>oops{CALL}", ["<tool_call>oops", SKY]),
    ("hermes", f"{NAMELESS}\n{CALL}", [NAMELESS, SKY]),
    ("hermes", CALL.replace("sky", r"one \" , }"), [("look", {"at": 'one " , }'})]),
    ("hermes", CALL.replace("sky", "say </tool_call> \\\\"), [("look", {"at": "say </tool_call> \\"})]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
    ("glm45", "<tool_call>now\n</tool_call>", [NOW]),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", [NOW]),
    (
        "gemma4",
        '<|tool_call>call:look{at:<|"|>a: {"b"}, <x><|"|>}<tool_call|>',
        [("look", {"at": 'a: {"b"}, <x>'})],
    ),
    (
        "gemma4",
        r'<|tool_call>call:look{at:"one \" , }",times:2}<tool_call|>',
        [("look", {"at": 'one " , }', "times": 2})],
    ),
    ("mistral", f"[TOOL_CALLS]look{SPELLED}[TOOL_CALLS]now[ARGS]{{}}", [LOOK, NOW]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {SPELLED}}}]', [LOOK]),
    ("mistral", r'[TOOL_CALLS]look{"at": "one \" , }"}', [("look", {"at": 'one " , }'})]),
    ("llama3_json", f'{{"name": "look", "parameters": {SPELLED}}}', [LOOK]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "now"}}; {{"name": "look", "parameters": {SPELLED}}}',
        [NOW, LOOK],
    ),
    ("llama3_json", r'{"name": "look", "parameters": {"at": "one \" , }"}}', [("look", {"at": 'one " , }'})]),
    ("pythonic", "[look(at='12', times=3, deep={'a': [1, None, 'é']}), now()]", [LOOK, NOW]),
    ("pythonic", r"[look(at='it\'s, ok', times=2)]", [("look", {"at": "it's, ok", "times": 2})]),
    ("pythonic", r"""[look(at="a\"),(", times=2)]""", [("look", {"at": 'a"),(', "times": 2})]),
    ("pythonic", r"[look(at='one \\', times=2)]", [("look", {"at": "one \\", "times": 2})]),
    ("pythonic", "[look(at='''it's, ok''', times=2)]", [("look", {"at": "it's, ok", "times": 2})]),
    (
        "lfm2",
        "Wait. <|tool_call_start|>[look(at='12', times=3), now()]<|tool_call_end|> Done.",
        ["Wait.", ("look", {"at": "12", "times": 3}), NOW, "Done."],
    ),
    ("lfm2", "<|tool_call_start|>[look(at='x')]", [("look", {"at": "x"})]),
    ("ernie45", f"\n\n{CALL}\n{CALL}\n", [SKY, SKY]),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0 <|tool_call_argument_begin|> "
        f"{SPELLED}<|tool_call_end|>\n<|tool_call_begin|>now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|> Done.",
        [LOOK, NOW, "Done."],
    ),
    (
        "kimi_k2",
        f"{KIMI}<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{{}}",
        [("a.b", {})],
    ),
    (
        "cohere_command3",
        f'I look.<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "look", "parameters": {SPELLED}}},\n'
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        ["I look.", LOOK, NOW],
    ),
    (
        "nemotron_json",
        '<TOOLCALL>[{"name": "now", "arguments": {}}, {"name": "look", "arguments": {"at": "sky"}}]'
        "</TOOLCALL> Done.",
        [NOW, SKY, "Done."],
    ),
    ("nemotron_json", '<TOOLCALL>{"name": "now"}</TOOLCALL>', [NOW]),
    (
        "hunyuan_a13b",
        '<tool_calls>[{"name": "look", "arguments": {"at": "sky"}}]</tool_calls> Done.',
        [SKY, "Done."],
    ),
    ("hunyuan_a13b", '<tool_calls>\n{"name": "now"}\n{"name": "now"}\n</tool_calls>', [NOW, NOW]),
    ("hy_v3", f"{HY}<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", [NOW]),
    (
        "hy_v3",
        f"{HY}<tool_call>look<tool_sep><arg_key>at</arg_key><arg_value>12</arg_value></tool_call>"
        "<tool_call>now<tool_sep></tool_call></tool_calls> Done.",
        [("look", {"at": "12"}), NOW, "Done."],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">12</parameter>\n'
        '<parameter name="times">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call> Done.",
        [("look", {"at": "12", "times": 3}), NOW, "Done."],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="now">', [NOW]),
    (
        "minimax_m3",
        f'{M3}<tool_call>\n{M3}<invoke name="look">{M3}<at>12{M3}</at>{M3}<times>3{M3}</times>{M3}<deep>'
        f"{M3}<item>{M3}<item>1{M3}</item>{M3}</item>{M3}</deep>{M3}</invoke>\n"
        f'{M3}<invoke name="now">{M3}</invoke>\n{M3}</tool_call> Done.',
        [("look", {"at": "12", "times": 3, "deep": [[1]]}), NOW, "Done."],
    ),
    (
        "minimax_m3",
        f'{M3}<tool_call>{M3}<invoke name="f">{M3}<a>{M3}<item>1{M3}</item>{M3}<b>x{M3}</b>{M3}</a>'
        f"{M3}</invoke>",
        [("f", {"a": {"item": 1, "b": "x"}})],
    ),
    (
        "step3",
        f"{STEP}<steptml:invoke name='look'><steptml:parameter name=\"at\">a < b</steptml:parameter>"
        f"</steptml:invoke><{BAR}tool_call_end{BAR}><{BAR}tool_sep{BAR}><{BAR}tool_call_begin{BAR}>"
        f'<steptml:invoke name="now"></steptml:invoke><{BAR}tool_call_end{BAR}>'
        f"<{BAR}tool_calls_end{BAR}> Done.",
        [("look", {"at": "a < b"}), NOW, "Done."],
    ),
]
HEAD = '{"name": "look", "arguments": '
#: Format, pieces of an output, and what comes of each; at last, what its end brings.
STEPS = [
    (
        "hermes",
        [
            ("<tool_call>" + HEAD, []),
            ('{"at": "s', ["look", '{"at": "s']),
            ("k\\", ["k"]),
            ('ny", "times": 1', ['\\ny", "times": ']),
            ("2}}", ["12}"]),
            ("</tool_call>", []),
        ],
    ),
    (
        "llama3_json",
        [
            ('{"parameters": {"at": 1}, ', []),
            ('"name": "look"}', ["look", '{"at": 1}']),
            ('; {"name": "now"', []),
            ("}", ["now", "{}"]),
        ],
    ),
    ("mistral", [("[TOOL_CALLS]look", []), ('[ARGS]{"at"', ["look", '{"at"']), (": 1}", [": 1}"])]),
    (
        "qwen3_coder",
        [
            ("<tool_call>\n<function=look", []),
            (">\n<parameter=at>\n1", ["look"]),
            ("2\n</parameter>\n<parameter=times>\n3\n", ['{"at": "12"']),
            ("</parameter>\n</function>", [', "times": 3}']),
        ],
    ),
    (
        "glm45",
        [
            ("<tool_call>look\n<arg_key>at</arg_key>", ["look"]),
            ("<arg_value>12</arg_value>", ['{"at": "12"']),
            ("</tool_call>", ["}"]),
        ],
    ),
    (
        "gemma4",
        [("<|tool_call>call:look{at:[1", ["look"]), ("],times:3", ['{"at": [1]']), ("}", [', "times": 3}'])],
    ),
    (
        "pythonic",
        [("[look(at='a', ", ["look", '{"at": "a"']), ("times=3", []), (")", [', "times": 3}']), ("]", [])],
    ),
    (
        "lfm2",
        [
            ("<|tool_call_start|>[look(at='a'", []),
            (")", ["look", '{"at": "a"}']),
            ("]<|tool_call_end|>", []),
        ],
    ),
    ("ernie45", [(f'<tool_call>{HEAD}{{"at"', ["look", '{"at"']), (": 1}}</tool_call>", [": 1}"])]),
    (
        "kimi_k2",
        [
            (f"{KIMI}<|tool_call_begin|>functions.look:0<|tool_call_argument", []),
            ('_begin|>{"at": "s', ["look", '{"at": "s']),
            ('ky"}<|tool_call_end|>', ['ky"}']),
            ("<|tool_calls_section_end|>", []),
        ],
    ),
    (
        "cohere_command3",
        [
            ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look"', []),
            (', "parameters": {"at"', ["look", '{"at"']),
            (": 1}}]", [": 1}"]),
            ("<|END_ACTION|>", []),
        ],
    ),
    ("nemotron_json", [(f"<TOOLCALL>[{HEAD}", []), ("{", ["look", "{"]), ("}}]</TOOLCALL>", ["}"])]),
    ("hunyuan_a13b", [(f"<tool_calls>[{HEAD}", []), ("{", ["look", "{"]), ("}}]</tool_calls>", ["}"])]),
    (
        "hy_v3",
        [
            (f"{HY}<tool_call>look<tool_sep>", ["look"]),
            ("<arg_key>at</arg_key><arg_value>12</arg_value>", ['{"at": "12"']),
            ("</tool_call></tool_calls>", ["}"]),
        ],
    ),
    (
        "minimax_m2",
        [
            ('<minimax:tool_call>\n<invoke name="look">', ["look"]),
            ('<parameter name="at">1', []),
            ("2</parameter>", ['{"at": "12"']),
            ("</invoke>\n", ["}"]),
            ("</minimax:tool_call>", []),
        ],
    ),
    (
        "minimax_m3",
        [
            (f'{M3}<tool_call>{M3}<invoke name="look">', ["look"]),
            (f"{M3}<at>1", []),
            (f"2{M3}</at>", ['{"at": "12"']),
            (f"{M3}</invoke>", ["}"]),
            (f"{M3}</tool_call>", []),
        ],
    ),
    (
        "step3",
        [
            (f'{STEP}<steptml:invoke name="look">', ["look"]),
            ('<steptml:parameter name="at">12</steptml:parameter>', ['{"at": "12"']),
            ("</steptml:invoke>", ["}"]),
            (f"<{BAR}tool_call_end{BAR}><{BAR}tool_calls_end{BAR}>", []),
        ],
    ),
]
#: Calls that end too early, or go on as none, and what of them has been read by then.
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', [("f", '{"a": [1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', [("f", '{"a": 1}'), "x"]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": no}}</tool_call>',
        [("f", '{"a": '), "no}}</tool_call>"],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}', [("f", '{"a": "b\\nc"}')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2", [("f", '{"a": 1')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>", [("f", '{"a": 1}')]),
    ("glm45", "<tool_call>f", ["<tool_call>f"]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", [("f", ""), "a</arg_key>1</tool_call>"]),
    ("gemma4", "<|tool_call>call:f{a:1,b:no}", [("f", '{"a": 1'), ",b:no}"]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"x": 1}]', [("f", "{}"), ', {"x": 1}]']),
    ("pythonic", "[f(a=1, b=g())]", [("f", '{"a": 1'), ", b=g())]"]),
    ("pythonic", "[f(a='x", ["[f(a='x"]),
    ("pythonic", "[f(a='\\ud83d')]", ["[f(a='\\ud83d')]"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', [("f", '{"a": "\\u00')]),
    ("hermes", '<tool_call>{"name": "f\\u00', ['<tool_call>{"name": "f\\u00']),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00x"}}', [("f", '{"a": "'), '\\u00x"}}']),
    ("gemma4", '<|tool_call>call:f{a:"\\u00', [("f", "")]),
    ("lfm2", "<|tool_call_start|>[f(a=1, b=g())]", [("f", '{"a": 1'), ", b=g())]"]),
    (
        "kimi_k2",
        f'{KIMI}<|tool_call_begin|>f:0<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|> so',
        [("f", '{"a": 1}'), "so"],
    ),
    ("kimi_k2", f'{KIMI}<|tool_call_begin|>f:0<|tool_call_argument_begin|>{{"a": [1', [("f", '{"a": [1')]),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}, {"x": 1}]',
        [("f", '{"a": 1}'), ', {"x": 1}]'],
    ),
    ("nemotron_json", '<TOOLCALL>[{"name": "f"}] so', [("f", "{}"), "so"]),
    (
        "hy_v3",
        "<tool_calls:x><tool_call:x>f<tool_sep:x><arg_key:x>a</arg_key:x>1",
        [("f", ""), "<arg_key:x>a</arg_key:x>1"],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1', [("f", "")]),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"></invoke> so', [("f", "{}"), "so"]),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<a>1{M3}</b>', [("f", ""), f"{M3}<a>1{M3}</b>"]),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<a>1{M3}</a>', [("f", '{"a": 1}')]),
    ("step3", f'{STEP}<steptml:invoke name="f"></steptml:invoke>', [("f", "{}")]),
]


def written(name: str, calls: list[dict[str, object]]) -> str:
    if name in ("pythonic", "lfm2"):
        # Their templates show the form in words alone.
        texts = [f"look({', '.join(f'{k}={v!r}' for k, v in call.items())})" for call in calls]
        listed = f"[{', '.join(texts)}]"
        return listed if name == "pythonic" else f"<|tool_call_start|>{listed}<|tool_call_end|>"
    shape, between = SHAPES[name]
    template = ChatTemplate("{% set f = messages[0].tool_calls[0].function %}" + shape)
    return between.join(
        template.render(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": call}}],
                }
            ]
        )
        for call in calls
    )

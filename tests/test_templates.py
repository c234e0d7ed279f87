"""Arguments of chat templates, and system messages: prompts are those of transformers' own rendering."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from llama_ssp import load_pair
from llama_ssp.config.arguments import each_key_once, in_full
from llama_ssp.config.tasks import NOT_OF_TEMPLATES
from llama_ssp.errors import DataError, UsageError
from llama_ssp.text.messages import Message
from llama_ssp.text.tokenizer import HubTokens, read_tokens, variables_of
from tests import templates
from tests.conftest import Command
from tests.templates import DROPS_SYSTEM, GEMMA2, GEMMA3, GPT_OSS, LLAMA3, MISTRAL, QWEN3, R1, expected

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "What is a quokka?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"$defs": {}, "type": "object"}}}
CASES = {
    "qwen3": (QWEN3, {"enable_thinking": [False, True], "tools": [[TOOL]]}),
    "r1": (R1, {}),
    "gemma3": (GEMMA3, {}),
    "llama3": (
        LLAMA3,
        {"date_string": ["1 Jan 2026"], "tools": [[TOOL]], "custom_tools": [[TOOL]]},
    ),
    "mistral": (MISTRAL, {"bos_token": ["<begin>"]}),
    "gpt-oss": (GPT_OSS, {"reasoning_effort": ["high"]}),
}
APPLY = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
WITHOUT_EFFECT = {("qwen3", "enable_thinking", "True")}
EACH = [
    pytest.param(template, {argument: value}, (name, argument, str(value)), id=f"{name}-{argument}-{number}")
    for name, (template, arguments) in CASES.items()
    for argument, values in arguments.items()
    for number, value in enumerate(values)
]
WORDS = ("draft=none", "task.max_new_tokens=2", "seed=1", "out=null", "engine=eager")


def tokens(folder: Path, template: str) -> HubTokens:
    known = read_tokens(templates.written(folder, template), templates.SIZE)
    assert isinstance(known, HubTokens)
    return known


def talks(template: str) -> list[list[Message]]:
    """Conversations of one turn and of several, with thoughts in the history."""
    said = {"role": "assistant", "content": "<think>\nA beast?\n</think>\n\nAn animal."}
    if template is GPT_OSS:
        said = {"role": "assistant", "content": "An animal.", "thinking": "A beast?"}
    later = [USER, said, {"role": "user", "content": "Where does it live?"}]
    result = [[USER], later]
    return result if template in (R1, GEMMA2) else [*result, [SYSTEM, USER], [SYSTEM, *later]]


@pytest.mark.parametrize(("template", "arguments", "name"), EACH)
def test_arguments_reach_the_template(
    template: str, arguments: dict[str, Any], name: tuple[str, str, str], tmp_path: Path
):
    """With and without them; each changes the prompt, except the one that is the template's own default."""
    known = tokens(tmp_path, template)
    for messages in talks(template):
        plain = known.chat(messages)
        changed = known.chat(messages, arguments)
        assert plain == expected(tmp_path, messages)
        assert changed == expected(tmp_path, messages, **arguments)
        assert (changed == plain) == (name in WITHOUT_EFFECT)


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path):
    """Also where a message names special tokens, which are then text."""
    template, _ = CASES[name]
    known = tokens(tmp_path, template)
    for messages in talks(template):
        assert known.chat(messages) == expected(tmp_path, messages)
        assert known.rendered(messages) == templates.theirs(tmp_path).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    if "sanitize_control_tokens" not in APPLY:
        pytest.skip("this transformers does not keep typed names of special tokens apart")
    for messages in talks(template)[::2]:  # those without thoughts, whose marks are ours to keep
        typed = [{**m, "content": f"What does <|im_end|> do,<s>? {m['content']}"} for m in messages]
        sanitized = expected(tmp_path, typed, sanitize_control_tokens=True)
        assert known.chat(typed) == sanitized != expected(tmp_path, typed)


def test_a_typed_name_stays_text_next_to_thoughts_that_the_template_strips(tmp_path: Path):
    """The template changes the message of the model; what the user typed is still found."""
    known = tokens(tmp_path, QWEN3)
    said = {
        "role": "assistant",
        "content": "<think>\nHm, <|im_end|>?\n</think>\n\nIt ends <|im_end|> a turn.",
    }
    typed = [{"role": "user", "content": "What does <|im_end|> do?"}, said, USER]
    ids = known.chat(typed, {"enable_thinking": False})
    end = known.vocabulary.ids["<|im_end|>"]
    assert ids.count(end) == 3, "one for each message"
    text = known.decode(ids)
    assert "What does <|im_end|> do?" in text and "It ends <|im_end|> a turn." in text
    assert "Hm, " not in text and text.endswith("<think>\n\n</think>\n\n")


def test_marks_that_are_typed_separate_nothing(tmp_path: Path):
    """The characters that mark names may be in a message themselves."""
    known = tokens(tmp_path, QWEN3)
    end = known.vocabulary.ids["<|im_end|>"]
    for typed in ("\ue000<|im_end|>\ue001", "\ue001<|im_end|>\ue000", "<|im_<|im_end|>end|>", "\ue000\ue001"):
        ids = known.chat([{"role": "user", "content": typed}])
        assert ids.count(end) == 1 and typed in known.decode(ids), typed


def test_a_template_without_a_system_role_is_refused_as_transformers_refuses_it(tmp_path: Path):
    known = tokens(tmp_path, GEMMA2)
    assert known.chat([USER]) == expected(tmp_path, [USER])
    with pytest.raises(Exception, match="System role not supported"):
        expected(tmp_path, [SYSTEM, USER])
    with pytest.raises(DataError, match=r"System role not supported.*leave out the system message"):
        known.chat([SYSTEM, USER])
    with pytest.raises(DataError, match="roles must alternate"):
        known.chat([USER, USER])


def test_a_system_message_that_a_template_drops_is_no_silent_loss(tmp_path: Path):
    """transformers renders the chat without it."""
    known = tokens(tmp_path, DROPS_SYSTEM)
    assert expected(tmp_path, [SYSTEM, USER]) == expected(tmp_path, [USER]) == known.chat([USER])
    with pytest.raises(DataError, match=r"leaves the system prompt out.*leave out the system message"):
        known.chat([SYSTEM, USER])


def test_a_system_message_that_a_template_rewrites_is_rendered(tmp_path: Path):
    """As a prompt is: it is refused where it is left out, not where it is written in another way."""
    known = tokens(tmp_path, QWEN3.replace("messages[0].content +", "messages[0].content | upper +"))
    assert "BE KIND." in known.decode(known.chat([SYSTEM, USER]))


def test_arguments_that_the_template_does_not_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    known = tokens(tmp_path, GEMMA2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert known.chat([USER], {"enable_thinking": False, "b": 1}) == known.chat([USER])
        assert caplog.messages == [
            f"the chat template of {tmp_path} does not read b, enable_thinking: it changes nothing"
        ]
        known.chat([USER], {"b": 2, "c": 1})
        assert "does not read c:" in caplog.messages[-1] and len(caplog.messages) == 2
        caplog.clear()
        tokens(tmp_path / "llama", LLAMA3).chat([USER], {"date_string": "today", "tools": [TOOL]})
        tokens(tmp_path / "qwen", QWEN3).chat([USER], {"enable_thinking": True})
        assert not caplog.messages


def test_names_that_a_template_sets_itself_are_none_that_it_reads():
    read = variables_of("{% set a = 1 %}{{ a }}{% for m in messages %}{{ m }}{{ b }}{% endfor %}")
    assert read == {"messages", "b"}
    assert "x" in variables_of("{% generation %}{{ x }}{% endgeneration %}"), "a tag of transformers"


def test_a_template_of_a_gguf_header_gets_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from tests.test_gguf_tokenizer import PRETOKENIZE_REGEX, byte_level, trained

    template = "{{ messages[0]['content'] }}{% if enable_thinking is false %}<think></think>{% endif %}"
    path = byte_level(tmp_path, "qwen2", trained(PRETOKENIZE_REGEX), chat_template=template)
    known = read_tokens(path, 400)
    assert known.rendered([USER], arguments={"enable_thinking": False}) == f"{USER['content']}<think></think>"
    assert known.rendered([USER], arguments={"other": 1}) == USER["content"]
    assert "does not read other" in caplog.text


def test_names_that_are_no_arguments_are_refused():
    """Each parameter of transformers' functions, except those that are passed on to the template."""
    parameters = {
        *APPLY,
        *inspect.signature(render_jinja_template).parameters,
        "messages",
    }
    assert parameters - {"kwargs", "tools", "documents"} <= NOT_OF_TEMPLATES


# Every task.


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return templates.model(tmp_path_factory.mktemp("qwen"), QWEN3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return templates.model(tmp_path_factory.mktemp("llama"), LLAMA3)


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every chat that is made from now on."""
    made = list[list[int]]()
    chat = HubTokens.chat

    def kept(known: HubTokens, *given: Any) -> list[int]:
        made.append(chat(known, *given))
        return made[-1]

    monkeypatch.setattr(HubTokens, "chat", kept)
    return made


def read_ids(scored: list[dict[str, Any]]) -> list[int]:
    """The ids that the model has read, by what it says of them."""
    return [token["token_id"] for token in scored]


ONES = [
    pytest.param(["enable_thinking=false"], {"enable_thinking": False}, id="a key"),
    pytest.param(["--enable-thinking", "false"], {"enable_thinking": False}, id="a flag"),
    pytest.param(["task.enable_thinking=true"], {"enable_thinking": True}, id="on"),
    pytest.param(["task.template={enable_thinking: false}"], {"enable_thinking": False}, id="a map of Hydra"),
    pytest.param(['template={"enable_thinking": false}'], {"enable_thinking": False}, id="JSON"),
    pytest.param(["task.template.enable_thinking=false"], {"enable_thinking": False}, id="an entry"),
    pytest.param(["template.enable_thinking=false"], {"enable_thinking": False}, id="a short entry"),
    pytest.param([f"template.tools={json.dumps([TOOL])}"], {"tools": [TOOL]}, id="an entry of JSON"),
    pytest.param(
        ["--template.enable_thinking", "true", "template.enable_thinking=false"],
        {"enable_thinking": False},
        id="the last one counts",
    ),
    pytest.param([], {}, id="none"),
]


@pytest.mark.parametrize(("words", "arguments"), ONES)
def test_generate_takes_arguments(words: list[str], arguments: dict[str, Any], command: Command, qwen: Path):
    answer = command(
        "task=generate", f"model={qwen}", *WORDS, "chat=true", "system=Be kind.", "prompt=What is a quokka?",
        "echo=true", "logprobs=0", *words,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    (output,) = answer.document["outputs"]
    assert read_ids(output["prompt_logprobs"]) == expected(qwen, [SYSTEM, USER], **arguments)


def test_texts_in_arguments_are_taken_as_they_are(command: Command, llama: Path):
    """Quotes, commas, ${...} and backslashes, in JSON; a text without them as Hydra takes it."""
    odd = 'it\'s ${seed}, or "so" \\ {x: 1}'
    for words, date in (
        (f"template={json.dumps({'date_string': odd})}", odd),
        ("template.date_string=1 May", "1 May"),
    ):
        answer = command(
            "task=generate", f"model={llama}", *WORDS, "chat=true", "prompt=What is a quokka?", "echo=true",
            "logprobs=0", words,
        )  # fmt: skip
        assert answer.code == 0, answer.err
        read = read_ids(answer.document["outputs"][0]["prompt_logprobs"])
        assert read == expected(llama, [USER], date_string=date)


def test_a_file_of_settings_has_arguments_too(command: Command, qwen: Path, tmp_path: Path):
    """Presets of one's own; the command line replaces an entry."""
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "quiet.yaml").write_text(
        "# @package _global_\ntask:\n  chat: true\n  template:\n    enable_thinking: false\n"
    )
    words = ("--config-dir", str(tmp_path / "mine"), "experiment=quiet", f"model={qwen}", *WORDS)
    words += ("prompt=What is a quokka?", "echo=true", "logprobs=0")
    for more, thinks in (((), False), (("template.enable_thinking=true",), True)):
        answer = command(*words, *more)
        assert answer.code == 0, answer.err
        read = read_ids(answer.document["outputs"][0]["prompt_logprobs"])
        assert read == expected(qwen, [USER], enable_thinking=thinks)


def test_chat_takes_arguments(command: Command, qwen: Path, chats: list[list[int]]):
    """In every turn; the thoughts of earlier ones are the template's to strip."""
    words = ("task=chat", f"model={qwen}", *WORDS)
    answer = command(*words, "enable_thinking=false", stdin=b"What is a quokka?\nWhere?\n")
    assert answer.code == 0, answer.err
    history = answer.document["messages"]
    assert chats == [expected(qwen, history[:n], enable_thinking=False) for n in (1, 3)]
    assert [reply["prompt_tokens"] for reply in answer.document["replies"]] == [len(ids) for ids in chats]
    chats.clear()
    assert command(*words, stdin=b"What is a quokka?\n").code == 0
    assert chats == [expected(qwen, history[:1])] != [expected(qwen, history[:1], enable_thinking=False)]


def write_lines(*lines: dict[str, Any]) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def batch(command: Command, folder: Path, *words: str) -> Any:
    return command(
        "task=batch", "task.input=in.jsonl", "task.output=out.jsonl", f"model={folder}", *WORDS, *words
    )


def told() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_records_of_a_batch_have_arguments_of_their_own(command: Command, qwen: Path):
    """Which go before the job's; a line may be plain or as OpenAI's."""
    own: list[dict[str, Any]] = [
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [USER]},
        {"prompt": USER["content"], "chat_template_kwargs": {"tools": [TOOL]}},
        {"messages": [SYSTEM, USER], "chat_template_kwargs": None},
    ]
    scored = {"echo": True, "logprobs": 0}
    body = {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": True, "tools": [TOOL]},
        "max_tokens": 1,
    }
    envelope = {"custom_id": "e", "method": "POST", "url": "/v1/chat/completions", "body": body}
    write_lines(*({**line, **scored} for line in own), envelope)
    answer = batch(command, qwen, "chat=true", "enable_thinking=false")
    assert answer.code == 0, answer.err
    *plain, last = told()
    assert [read_ids(line["prompt_logprobs"]) for line in plain] == [
        expected(qwen, [USER], enable_thinking=True),
        expected(qwen, [USER], enable_thinking=False),
        expected(qwen, [USER], enable_thinking=False, tools=[TOOL]),
        expected(qwen, [SYSTEM, USER], enable_thinking=False),
    ]
    both = expected(qwen, [USER], enable_thinking=True, tools=[TOOL])
    assert last["response"]["body"]["usage"]["prompt_tokens"] == len(both)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "a prompt that is no chat"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs is unusable"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "tokenize is no argument"),
        ({"messages": [USER], "chat_template_kwarg": {}}, "did you mean chat_template_kwargs?"),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "chat_template_kwargs": {}}},
            "asks for chat_template_kwargs, which is not served",
        ),
        ({"messages": [USER], "chat_template_kwargs": {"tools": 1}}, "refuses the prompt"),
    ],
    ids=["no chat", "no object", "not of templates", "misspelt", "a completion", "what transformers refuses"],
)
def test_arguments_of_a_record_that_cannot_be_used_are_refused(
    line: dict[str, Any], says: str, command: Command, qwen: Path
):
    write_lines(line)
    answer = batch(command, qwen)
    assert answer.code == 3 and len(answer.errors) == 1 and says in answer.errors[0], answer.err


def test_thoughts_in_the_messages_of_a_record_reach_the_template(command: Command, tmp_path: Path):
    """Under the name that servers give them; they are texts, and of the model alone."""
    oss = templates.model(tmp_path / "oss", GPT_OSS)
    said = {"role": "assistant", "content": "An animal.", "thinking": "A beast?"}
    write_lines({"messages": [USER, said], "echo": True, "logprobs": 0})
    assert batch(command, oss).code == 0
    (line,) = told()
    assert line["messages"] == [USER, said]
    assert read_ids(line["prompt_logprobs"]) == expected(oss, [USER, said])
    for wrong in ({**USER, "thinking": "Hm"}, {**said, "thinking": 1}):
        write_lines({"messages": [wrong]})
        refused = batch(command, oss, "task.output=b.jsonl")
        assert refused.code == 3 and "message 1" in refused.errors[0]


def test_a_job_keeps_its_arguments(command: Command, qwen: Path):
    """In whichever form they are given. A job without any has no such setting, as those of older versions."""
    write_lines({"messages": [USER]}, {"messages": [SYSTEM, USER]})
    assert batch(command, qwen).code == 0
    settings = json.loads(Path("out.jsonl.work/run.json").read_text())["settings"]
    assert not [key for key in settings if "template" in key or "thinking" in key]
    assert batch(command, qwen).code == 0
    for words in (["enable_thinking=false"], ["template.date_string=x"]):
        refused = batch(command, qwen, *words)
        assert refused.code == 3 and "task.template=None now {" in refused.errors[0], refused.err

    other = ("task.output=b.jsonl",)
    assert batch(command, qwen, "enable_thinking=false", *other).code == 0
    assert batch(command, qwen, "template={enable_thinking: false}", *other).code == 0
    for words in ([], ["enable_thinking=true"]):
        refused = batch(command, qwen, *words, *other)
        assert refused.code == 3 and "task.template={'enable_thinking': False} now" in refused.errors[0]


def test_a_job_of_an_older_version_goes_on(command: Command, qwen: Path):
    """Its settings lack what is new: the second of its records is answered now."""
    write_lines({"id": "a", "messages": [USER]}, {"id": "b", "messages": [SYSTEM, USER]})
    assert batch(command, qwen, "task.shard_size=1").code == 0
    whole = Path("out.jsonl").read_text()
    work = Path("out.jsonl.work")
    (work / "done" / "00001.jsonl").unlink(missing_ok=True)
    for file in [Path("out.jsonl"), *(f for f in (work / "done").iterdir() if "00001" in f.name)]:
        file.unlink()
    assert batch(command, qwen, "task.shard_size=1").code == 0
    assert Path("out.jsonl").read_text() == whole


def test_eval_takes_chats(command: Command, qwen: Path, chats: list[list[int]]):
    words = ("task=eval", f"model={qwen}", "draft=none", "seed=1", "out=null", "engine=eager")
    words += ("sizes=2", "seeds=0", "shots=1", "max_new_tokens=2")
    assert command(*words, "chat=true", "system=Be kind.", "enable_thinking=false").code == 0
    from llama_ssp.tasks.arithmetic import questions

    asked = [{"role": "user", "content": question.text} for question in questions(0, 2, 1)]
    assert chats == [expected(qwen, [SYSTEM, one], enable_thinking=False) for one in asked]
    chats.clear()
    assert command(*words).code == 0 and not chats
    refused = command(*words, "enable_thinking=false")
    assert refused.code == 2 and "task.enable_thinking is a part of a chat" in refused.errors[0]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("compare", ["task.max_new_tokens=2"]),
        ("measure", ["task.max_new_tokens=2", "ks=1", "repeats=1"]),
        ("agree", ["task.max_new_tokens=2", "chunk=2"]),
        (
            "certify",
            ["task.max_new_tokens=2", "samples=8", "law_tokens=4", "law_rounds=1", "greedy_tokens=2"],
        ),
    ],
)
def test_tasks_that_compare_take_arguments(
    task: str, words: list[str], command: Command, qwen: Path, chats: list[list[int]]
):
    command(
        f"task={task}", f"model={qwen}", f"draft={qwen}", "seed=1", "out=null", "engine=eager", "chat=true",
        "prompt=What is a quokka?", "template.enable_thinking=false", "k=1" if task != "agree" else "seed=1",
        *words,
    )  # fmt: skip
    assert chats and all(ids == expected(qwen, [USER], enable_thinking=False) for ids in chats)


def test_the_api_takes_arguments(qwen: Path, chats: list[list[int]]):
    with load_pair(qwen, max_tokens=256, overrides=["engine=eager"]) as pair:
        how: dict[str, Any] = {"max_new_tokens": 1, "chat": True, "seed": 1}
        given: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({}, {}),
            ({"enable_thinking": False}, {"enable_thinking": False}),
            (
                {"template": {"tools": [TOOL]}, "enable_thinking": True},
                {"tools": [TOOL], "enable_thinking": True},
            ),
        ]
        for settings, arguments in given:
            (completion,) = pair.generate([USER["content"]], **how, **settings)
            ids = expected(qwen, [USER], **arguments)
            assert chats.pop() == ids and completion.prompt_tokens == len(ids)
        list(pair.stream([USER["content"]], **how, system="Be kind.", enable_thinking=False))
        assert chats.pop() == expected(qwen, [SYSTEM, USER], enable_thinking=False)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"chat": False, "enable_thinking": False}, "a part of a chat"),
            ({"template": {"tokenize": False}}, "no argument of a chat template"),
            ({"template": {"tools": [print]}}, "cannot be used"),
            ({"template": {"enable_thinking": False}, "enable_thinking": True}, "given twice"),
            ({"template": "no map"}, "wrong type"),
            ({"enable_thinking": "no"}, "wrong type"),
        ]
        for settings, says in wrong:
            with pytest.raises(UsageError, match=says):
                pair.generate([USER["content"]], **{**how, **settings})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chat=true", "template.messages=[]"], "messages is no argument of a chat template"),
        (["chat=true", "template={enable_thinking: true}", "enable_thinking=true"], "given twice"),
        (["template={a: 1}"], "task.template is a part of a chat"),
        (["chat=true", "template=yes"], "Dict"),
        (["chat=true", 'template={"\u00e9": 1}'], "a name that a command line cannot have"),
        (["chat=true", 'template={"a": {"true": 1}}'], "a name that a command line cannot have"),
        (["chat=true", "template.a=x, y"], "template.a"),
        (["task=plan", "template={a: 1}"], "task=plan has no key template"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(words: list[str], says: str, command: Command):
    answer = command(*words)
    assert answer.code == 2 and len(answer.errors) == 1 and says in answer.errors[0], answer.err


def test_words_of_a_map_are_all_kept():
    """Where words are started anew, for groups and in what is shown: what is in full stays as it is."""
    words = ["template={a: 1}", "k=2", "template.b=2", 'template={"c": "x, y"}', "template.b=3", "k=4"]
    kept = [*each_key_once(words).values()]
    assert kept == ["template={a: 1}", "k=4", *words[2:5]]
    full = in_full(words)
    assert in_full(full) == full


def test_an_argument_in_vain_is_one_line(command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """In a chat with a model that has no template, too."""
    folder = templates.model(tmp_path / "gemma", GEMMA2)
    answer = command(
        "task=generate", f"model={folder}", *WORDS, "chat=true", "prompt=x", "enable_thinking=false"
    )
    assert answer.code == 0
    assert caplog.text.count("does not read enable_thinking: it changes nothing") == 1
    refused = command("task=generate", f"model={folder}", *WORDS, "chat=true", "prompt=x", "system=Be kind.")
    assert refused.code == 3 and len(refused.errors) == 1 and "System role not supported" in refused.errors[0]
    said = command("task=chat", *WORDS, "enable_thinking=false", stdin=b"hello\n")
    assert said.code == 0
    assert "without a template its arguments change nothing: enable_thinking" in caplog.text

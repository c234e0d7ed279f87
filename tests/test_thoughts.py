"""What a model thinks before it answers: found in texts, shown or hidden, kept for the template's history."""

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load_pair
from llama_ssp.errors import DataError
from llama_ssp.pair.conversation import Conversation
from llama_ssp.text.detokenizer import TextSoFar
from llama_ssp.text.thoughts import FAMILIES, USUAL, TextPart, Thoughts, ThoughtStream, thoughts_of
from llama_ssp.text.tokenizer import HubTokens, read_tokens
from tests import checkpoints, templates
from tests.conftest import Command
from tests.templates import GPT_OSS, LLAMA3, MISTRAL, QWEN3, R1, expected
from tests.test_terminal import Terminal

HARMONY = FAMILIES[0]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
KIMI = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }}{% endfor %}"
# A family, whether a text begins within a thought, and its parts: a thought, an answer, a thought ...
TEXTS: list[tuple[Thoughts, bool, list[str]]] = [
    (USUAL, False, ["<think>\nHm\n</think>\n\n", "yes"]),
    (USUAL, False, ["", "well <b>, ", "<think>a < b</think> ", "yes </think> or <thin"]),
    (USUAL, False, ["<think>hm</think>", "a", "<think>no</think>\n", "b"]),
    (USUAL, True, ["hm\n</think>\n\n", "yes"]),
    (USUAL, False, ["<think>never ended </thi"]),
    (USUAL, False, ["", "no thought at all <"]),
    (USUAL, False, ["<think>hm</think>\n \n"]),
    (HARMONY, True, [f"{ANALYSIS}hm{NEXT}{ANALYSIS}so{NEXT}{FINAL}", "yes"]),
    (HARMONY, True, [FINAL, "yes"]),
    (FAMILIES[1], False, ["<|channel>thought\nhm<channel|>", "yes"]),
    (FAMILIES[2], False, ["[THINK]hm[/THINK]", "yes [THIN"]),
]


def tokens(folder: Path, template: str) -> HubTokens:
    known = read_tokens(templates.written(folder, template), templates.SIZE)
    assert isinstance(known, HubTokens)
    return known


def joined(parts: list[TextPart]) -> list[TextPart]:
    """Makes one part of those in a row that are of one kind."""
    result = list[TextPart]()
    for part in parts:
        if result and result[-1].is_thought == part.is_thought:
            result[-1] = TextPart(result[-1].text + part.text, part.is_thought)
        else:
            result.append(part)
    return result


@pytest.mark.parametrize(("thoughts", "begins", "texts"), TEXTS)
def test_a_text_is_divided_wherever_it_is_cut(thoughts: Thoughts, begins: bool, texts: list[str]):
    """In two places, each letter by itself, and whole; nothing is lost, and nothing comes early."""
    parts = [TextPart(text, number % 2 == 0) for number, text in enumerate(texts) if text]
    whole = "".join(texts)
    cuts = [*combinations(range(len(whole) + 1), 2), tuple(range(len(whole) + 1))]
    for places in cuts:
        stream = ThoughtStream(thoughts, begins)
        bounds = [0, *places, len(whole)]
        seen = list[TextPart]()
        for first, last in pairwise(bounds):
            seen += stream.take(whole[first:last])
            held = "".join(part.text for part in seen)
            assert whole.startswith(held) and len(whole[:last]) - len(held) < len(
                thoughts.open + thoughts.close
            )
        seen += stream.take("", ended=True)
        assert joined(seen) == parts, places


def test_families_are_known_by_their_templates_and_tokens():
    cases: list[tuple[str, set[str], str, str]] = [
        (QWEN3, set(), "<think>", ""),
        (R1, set(), "<think>", ""),
        (GPT_OSS, set(), ANALYSIS, "thinking"),
        (KIMI, set(), "<think>", "reasoning_content"),
        (LLAMA3, set(), "<think>", ""),
        (MISTRAL, {"[THINK]", "[/THINK]"}, "[THINK]", ""),
        ("{{ message['thinking'] }}", {"<channel|>"}, "<|channel>thought", "thinking"),
        ("{% if thinking %}{{ reasoning_effort }}{% endif %}", set(), "<think>", ""),
    ]
    for template, names, opening, field in cases:
        found = thoughts_of(template, names)
        assert (found.open, found.field) == (opening, field), template


def test_special_tokens_that_mark_thoughts_stay_in_texts(tmp_path: Path):
    """Also token by token; other special tokens have no text. Another family's are none of ours."""
    text = f"{ANALYSIS}Hm{NEXT}{FINAL}Yes"
    known = tokens(tmp_path / "oss", GPT_OSS)
    ids = known.encode(f"{text}<|im_end|>", special=True, begin=False)
    assert known.decode(ids) == text
    written = TextSoFar(known.decode, known.encode("a prompt"), [])
    for token_id in ids:
        written.push(token_id)
    written.end()
    assert written.text == text
    assert tokens(tmp_path / "qwen", QWEN3).decode(ids) == "analysisHmassistantfinalYes"


def test_an_end_token_is_no_mark(tmp_path: Path):
    """The header of a GGUF file may name <|end|> as one."""
    folder = templates.written(tmp_path, GPT_OSS)
    end = templates.theirs(folder).convert_tokens_to_ids("<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    known = read_tokens(folder, templates.SIZE)
    assert known.decode(known.encode("Hm<|end|>", special=True, begin=False)) == "Hm"


def test_a_prompt_may_begin_a_thought(tmp_path: Path):
    asked = [{"role": "user", "content": "x"}]
    cases = [
        (R1, {}, True),
        (QWEN3, {}, False),
        (QWEN3, {"enable_thinking": False}, False),
        (GPT_OSS, {}, True),
    ]
    for number, (template, arguments, begins) in enumerate(cases):
        known = tokens(tmp_path / str(number), template)
        (part,) = known.thought_stream(known.chat(asked, arguments)).take("hm", ended=True)
        assert part == ("hm", begins), number


@pytest.mark.parametrize(
    ("template", "text", "message"),
    [
        (QWEN3, "<think>\nHm\n</think>\n\nYes", {"content": "<think>\nHm\n</think>\n\nYes"}),
        (R1, "Hm\n</think>\n\nYes", {"content": "Hm\n</think>\n\nYes"}),
        (GPT_OSS, f"{ANALYSIS}Hm{NEXT}{FINAL}Yes", {"content": "Yes", "thinking": "Hm"}),
        (
            GPT_OSS,
            f"{ANALYSIS}Hm{NEXT}{ANALYSIS}So{NEXT}{FINAL}Yes",
            {"content": "Yes", "thinking": "Hm\n\nSo"},
        ),
        (GPT_OSS, f"{ANALYSIS}Hm", {"content": ""}),
        (GPT_OSS, f"{ANALYSIS}Hm{NEXT}{ANALYSIS}So", {"content": ""}),
        (GPT_OSS, f"{ANALYSIS}Hm{NEXT}<|channel|>commentary", {"content": ""}),
        (GPT_OSS, "Yes", {"content": "Yes"}),
        (GPT_OSS.replace("thinking", "x"), f"{ANALYSIS}Hm{NEXT}{FINAL}Yes", {"content": "Yes"}),
        (QWEN3, "<think>\nHm", {"content": ""}),
        (QWEN3, "<think>Hm</think>Yes, <think>or", {"content": "<think>Hm</think>Yes,"}),
        (KIMI, "<think>Hm", {"content": ""}),
        (KIMI, "<think>Hm</think>Yes", {"content": "Yes", "reasoning_content": "Hm"}),
        (KIMI, "Hm</think>Yes", {"content": "Yes", "reasoning_content": "Hm"}),
        (LLAMA3, "<think>Hm</think>Yes", {"content": "<think>Hm</think>Yes"}),
    ],
)
def test_a_reply_is_a_message_as_the_template_takes_it(template: str, text: str, message: dict[str, str]):
    made = thoughts_of(template).message(text)
    assert made.pop("role") == "assistant"
    made = {key: value.replace("\n\n\n", "\n\n") for key, value in made.items()}
    assert made == message


def test_a_thought_that_the_prompt_begins_may_be_cut():
    """With the control of a text that its prompt has not begun so."""
    known = thoughts_of(R1)
    for begins, content in ((True, ""), (False, "Hm, 12")):
        assert known.message("Hm, 12", begins) == {"role": "assistant", "content": content}
    assert known.message("Hm</think>Yes", begins=True)["content"] == "Hm</think>Yes"
    assert thoughts_of(GPT_OSS).message("Yes", begins=True)["content"] == "Yes"  # its prompts always do


@pytest.mark.parametrize("template", [QWEN3, R1, GPT_OSS])
@pytest.mark.parametrize("asked", ["What does {} do?", "{}", "x {} {}"])
def test_a_message_that_names_a_special_token_is_text_for_good(asked: str, template: str, tmp_path: Path):
    """Later messages are not refused, even where the marks of thoughts are special tokens, too."""
    made = checkpoints.tokenizer()
    made.add_special_tokens([*templates.SPECIAL, *templates.THINK])
    checkpoints.write_tokenizer(tmp_path, made, chat_template=template)
    known = read_tokens(tmp_path, templates.SIZE)
    assert isinstance(known, HubTokens)
    text = {
        QWEN3: "<think>\nHm\n</think>\n\nIt ends, as {} does",
        R1: "Hm</think>It ends, as {} does",
        GPT_OSS: f"{ANALYSIS}Hm{NEXT}{FINAL}It ends, as {{}} does",
    }[template]
    for name in ("<|im_end|>", "<|User|>", "<|end|>"):
        asks = {"role": "user", "content": asked.format(name, name)}
        said = known.thoughts.message(text.format(name))
        later = {"role": "user", "content": "And?"}
        ids = known.chat([asks, said, later])
        (number,) = (made.token_to_id(name),)
        other = asked.format("a word", "a word"), text.format("a word")
        plain = [{"role": "user", "content": other[0]}, known.thoughts.message(other[1]), later]
        assert ids.count(number) == known.chat(plain).count(number), name
        assert "Hm" not in known.decode(ids)


def test_a_conversation_keeps_no_open_thought(tmp_path: Path):
    """Of a reply that was cut within it; the next prompt is that of an empty reply."""
    folder = templates.scripted(tmp_path, QWEN3, "<think>Hm, 12</think>Yes!")
    with load_pair(folder, None, max_tokens=300) as pair:
        talk = Conversation(pair.session, 1, 300, 5)
        "".join(talk.reply("x"))
        assert "<think>" in talk.replies[0].text and "</think>" not in talk.replies[0].text
        assert talk.history[-1] == {"role": "assistant", "content": ""}
        talk.new_tokens = 0
        "".join(talk.reply("x"))
        assert talk.history[-1]["content"] == "<think>Hm, 12</think>Yes!"
        assert talk.replies[-1].finish_reason == "eos"


@pytest.mark.parametrize("template", [QWEN3, R1, GPT_OSS])
def test_thoughts_are_kept_out_of_the_history_where_the_template_does_so(template: str, tmp_path: Path):
    """The prompt is the one of transformers, and that of a conversation without thoughts."""
    known = tokens(tmp_path, template)
    text = {
        QWEN3: "<think>\nHm\n</think>\n\nYes",
        R1: "Hm</think>Yes",
        GPT_OSS: f"{ANALYSIS}Hm{NEXT}{FINAL}Yes",
    }[template]
    first = {"role": "user", "content": "x"}
    later = {"role": "user", "content": "And?"}
    said = known.thoughts.message(text)
    ids = known.chat([first, said, later])
    assert ids == expected(tmp_path, [first, said, later])
    assert ids == known.chat([first, {"role": "assistant", "content": "Yes"}, later])
    if template is GPT_OSS:  # which refuses what the model has written
        with pytest.raises(DataError, match="containing"):
            known.chat([first, {"role": "assistant", "content": text}, later])


# On the screen, and in files.

WORDS = ("draft=none", "seed=1", "engine=eager", "task.max_new_tokens=40")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return templates.scripted(tmp_path_factory.mktemp("deep"), QWEN3, "<think>Hm, 12</think>Yes!")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return templates.scripted(tmp_path_factory.mktemp("distilled"), R1, "Hm, 12</think>Yes!")


WHOLE = {"thinker": "<think>Hm, 12</think>Yes!", "distilled": "Hm, 12</think>Yes!"}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("shown", "batch"), [(True, 8), (False, 8), (False, 1)])
def test_generate_shows_thoughts_or_hides_them(
    name: str, shown: bool, batch: int, command: Command, request: pytest.FixtureRequest
):
    """In a pipe; documents and lines of JSON, and the run's folder, have the whole text."""
    folder = request.getfixturevalue(name)
    words = ("task=generate", f"model={folder}", *WORDS, "chat=true", "prompt=x", "prompt=y")
    words += (f"task.show_thinking={str(shown).lower()}", f"task.batch_size={batch}")
    answer = command(*words)
    whole = WHOLE[name]
    assert answer.code == 0
    assert answer.out == (f"{whole}\n{whole}\n" if shown else "Yes!\nYes!\n")
    assert [output["text"] for output in answer.document["outputs"]] == [whole] * 2
    summary = json.loads((Path(answer.document["run_folder"]) / "summary.json").read_text())
    assert summary["outputs"][0]["text"] == whole
    lines = command(*words, "output=jsonl").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [whole] * 2


@pytest.mark.parametrize("name", WHOLE)
def test_chat_shows_thoughts_or_hides_them(name: str, command: Command, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(name)
    words = ("task=chat", f"model={folder}", *WORDS)
    for shown, said in (("true", WHOLE[name]), ("false", "Yes!")):
        answer = command(*words, f"task.show_thinking={shown}", stdin=b"x\ny\n")
        assert answer.code == 0 and answer.out == f"{said}\n{said}\n"
        assert [reply["text"] for reply in answer.document["replies"]] == [WHOLE[name]] * 2
        assert answer.document["messages"][1]["content"] == WHOLE[name]


def test_a_batch_keeps_whole_texts(command: Command, thinker: Path):
    Path("in.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    words = ("task=batch", f"model={thinker}", *WORDS, "task.input=in.jsonl", "task.output=out.jsonl")
    assert command(*words).code == 0
    assert json.loads(Path("out.jsonl").read_text())["text"] == WHOLE["thinker"]


def test_a_thought_that_never_ends_leaves_an_empty_line(command: Command, distilled: Path):
    """With the tokens of the answer cut off."""
    words = ("task=generate", f"model={distilled}", *WORDS, "chat=true", "prompt=x", "task.max_new_tokens=3")
    hidden = command(*words, "show_thinking=false")
    written = hidden.document["outputs"][0]["text"]
    assert hidden.out == "\n" and "Hm, 12".startswith(written) and written
    assert command(*words).out == f"{written}\n"


@pytest.mark.parametrize("task", ["chat", "generate"])
def test_a_terminal_dims_thoughts(task: str, thinker: Path, tmp_path: Path):
    """And says that there are some where they are hidden."""
    session: tuple[Any, ...] = (f"task={task}", f"model={thinker}", *WORDS, "out=null")
    if task == "generate":
        session += ("chat=true", "prompt=x")
    dim, usual = "\x1b[2m", "\x1b[0m"
    for words in ([], ["show_thinking=false"]):
        terminal = Terminal(tmp_path, *words, session=session)
        if task == "chat":
            terminal.until("> ")
            terminal.type("x\n")
        terminal.until("Yes!")
        seen = terminal.seen
        if task == "chat":
            terminal.until("> ")
            terminal.type("/exit\n")
        assert terminal.leave() == 0
        plain = "".join(piece.partition(usual)[2] for piece in seen.split(dim))
        dimmed = "".join(piece.partition(usual)[0] for piece in seen.split(dim)[1:])
        assert "Yes!" in plain and "Hm" not in plain and "think" not in plain
        if words:
            assert "thinking ..." in dimmed and "Hm" not in seen
        else:
            assert "<think>Hm, 12</think>" in dimmed

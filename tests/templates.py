"""Chat templates in the manner of the families that people run, and folders of models that have them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests import checkpoints

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# DeepSeek's distilled models: what is written begins within a thought.
R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

GEMMA2 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

GEMMA3 = """\
{{ bos_token }}
{%- set first = '' %}
{%- set loop_messages = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- for message in loop_messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

DROPS_SYSTEM = """\
{%- for message in messages %}
    {%- if message['role'] != 'system' %}{{- '[' + message['role'] + ']' + message['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools is not none and tools_in_user_message %}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
    {%- endif %}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] + '\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system_message if loop.last else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# The thoughts of earlier messages are a field of their own; a content with marks of thoughts is refused.
GPT_OSS = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>analysis<|message|>' in message.content %}
            {{- raise_exception('You have passed a message containing <|channel|> tags') }}
        {%- endif %}
        {%- if loop.last and 'thinking' in message %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>", "<start_of_turn>", "<end_of_turn>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<|start|>", "<|end|>",
    "<|message|>", "<|channel|>",
]  # fmt: skip
THINK = ["<think>", "</think>"]  # tokens of their own, and no special ones, as in the families that have them
SIZE = 300 + len(SPECIAL) + len(THINK)


def written(folder: Path, template: str) -> Path:
    """Gives a folder a tokenizer with all these tokens, and with this template."""
    made = checkpoints.tokenizer()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(THINK)
    checkpoints.write_tokenizer(folder, made, chat_template=template)
    return folder


def model(folder: Path, template: str, context: int = 1024) -> Path:
    """A random model with such a tokenizer."""
    checkpoints.save(folder, vocab_size=SIZE, max_position_embeddings=context)
    return written(folder, template)


def scripted(folder: Path, template: str, text: str) -> Path:
    """A model that continues every chat with this text, a token of which has one place in it.

    A layer adds nothing, so the next token depends on the last one alone.
    """
    written(folder, template)
    known = theirs(folder)
    before = expected(folder, [{"role": "user", "content": "x"}])[-1]
    script = [before, *known.encode(text, add_special_tokens=False), known.eos_token_id]
    assert len({*script}) == len(script), known.convert_ids_to_tokens(script)
    checkpoints.save(
        folder, vocab_size=SIZE, hidden_size=320, head_dim=80, max_position_embeddings=512,
        made=Tokenizer.from_file(str(folder / "tokenizer.json")),
    )  # fmt: skip
    written(folder, template)

    def fill(tensors: checkpoints.Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                tensor.zero_()
        tensors["model.embed_tokens.weight"].copy_(torch.eye(SIZE, 320))
        for last, following in pairwise(script):
            tensors["lm_head.weight"][following, last] = 20.0

    checkpoints.edit_tensors(folder, fill)
    return folder


def theirs(folder: Path) -> Any:
    """transformers' own tokenizer."""
    return AutoTokenizer.from_pretrained(folder)


def expected(folder: Path, messages: list[dict[str, str]], **arguments: Any) -> list[int]:
    """What users of transformers get."""
    ids: list[int] = theirs(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **arguments
    )
    return ids

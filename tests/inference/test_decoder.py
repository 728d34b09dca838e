"""Completions of batched prompts are those of each prompt alone, and are counted as what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fsdp_shard.errors import ConfigError, DataError, LossError, ModelError
from fsdp_shard.inference.config import GenerateSettings, GenerationSettings
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.inference.generation.batching import complete
from fsdp_shard.inference.generation.decoder import Decoder, generation_config
from fsdp_shard.inference.generation.kv_cache_size import KVCacheBudget, cache_bytes, kv_cache_budget
from fsdp_shard.inference.generation.prefix_cache import PrefixCache
from fsdp_shard.inference.generation.prompts import Completion, Prompt
from fsdp_shard.inference.generation.tokenize_prompts import check_room, tokenize, tokenize_prompts
from fsdp_shard.models import ContextLength, check_causal, context_length_of, kv_cache_of, no_split_blocks
from fsdp_shard.utils import check
from tests.support.tiny import byte_tokenizer, llama_config

TOKENIZER = byte_tokenizer()
PROMPTS = [Prompt(text, f"line {number}") for number, text in enumerate(["abc", "a longer prompt", "x", "yes", "no"])]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    return load_dispatched(tiny_model, device_map="disk")


def run(model: PreTrainedModel, settings: GenerationSettings, seed: int = 0, num_done: int = 0) -> list[Completion]:
    encoded = tokenize_prompts(TOKENIZER, PROMPTS, model.config)
    return list(complete(Decoder(model, TOKENIZER, settings), PROMPTS, encoded, seed=seed, num_done=num_done))


def greedy(path: Path, text: str, max_new_tokens: int) -> list[int]:
    """What plain transformers says, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    out = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=256, pad_token_id=256)
    return [int(token) for token in out[0, ids.shape[1] :]]


def test_batches_of_a_model_whose_config_asks_for_router_logits() -> None:
    """Models trained with the routers' auxiliary loss have the flag; with a cache, transformers cannot compute that."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 257, "eos_token_id": None}
    answers = []
    for asks in (True, False):
        torch.manual_seed(0)
        config = AutoConfig.for_model("mixtral", output_router_logits=asks, **sizes, **experts)
        model = AutoModelForCausalLM.from_config(config).eval()
        decoder = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=3))
        answers.append([answer.tokens for answer in decoder.run([[1, 2, 3], [4, 5]])])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_completions_are_those_of_each_prompt_alone_in_input_order(
    tiny_model: Path, model: PreTrainedModel, batch_size: int
) -> None:
    completions = run(model, GenerationSettings(max_new_tokens=6, batch_size=batch_size))
    assert [completion.prompt for completion in completions] == [prompt.text for prompt in PROMPTS]
    for completion in completions:
        tokens = greedy(tiny_model, completion.prompt, 6)
        assert completion.completion == TOKENIZER.decode(tokens, skip_special_tokens=True)
        assert completion.num_new_tokens == len(tokens)


def test_attention_makes_no_plan_for_the_length_of_each_token(model: PreTrainedModel) -> None:
    seen: list[bool] = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    assert was_enabled
    try:
        run(model, GenerationSettings(max_new_tokens=2))
        assert seen
        assert not any(seen)
        assert torch.backends.cuda.cudnn_sdp_enabled()

        def fail(text: str) -> None:
            raise ConfigError(text)

        with pytest.raises(ConfigError):
            Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=2)).run([[1]], on_text=fail)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        handle.remove()


def test_what_follows_the_end_is_neither_shown_nor_counted(tiny_model: Path, model: PreTrainedModel) -> None:
    tokens = greedy(tiny_model, "abc", 6)
    end = tokens[3]
    config = model.generation_config
    try:
        config.eos_token_id = end
        (first, *_) = run(model, GenerationSettings(max_new_tokens=6))
        until = tokens.index(end) + 1
        assert first.num_new_tokens == until
        assert first.completion == TOKENIZER.decode(tokens[:until], skip_special_tokens=True)
    finally:
        config.eos_token_id = None


def test_figures_count_all_batches(model: PreTrainedModel) -> None:
    decoder = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=4, batch_size=2))
    encoded, figures = tokenize_prompts(TOKENIZER, PROMPTS, model.config), decoder.figures
    completions = list(complete(decoder, PROMPTS, encoded))
    assert figures.num_new_tokens == sum(completion.num_new_tokens for completion in completions) > 0
    assert figures.first_token_seconds is not None
    assert 0 < figures.first_token_seconds < figures.seconds
    assert figures.tokens_per_second == figures.num_new_tokens / figures.seconds


def test_sampling_follows_the_seed_and_the_settings(model: PreTrainedModel) -> None:
    settings = GenerationSettings(max_new_tokens=8, do_sample=True, temperature=3.0)
    runs = [run(model, settings, seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert run(model, settings, num_done=3) == runs[0][3:]  # a run that goes on draws what it would have drawn
    cold = GenerationSettings(max_new_tokens=8, do_sample=True, top_k=1)
    assert run(model, cold) == run(model, GenerationSettings(max_new_tokens=8))


def test_settings_reach_the_generation_config(model: PreTrainedModel) -> None:
    model.generation_config.update(temperature=0.3, top_p=0.5, do_sample=True, max_time=0.01)
    try:
        greedily = generation_config(model, TOKENIZER, GenerationSettings(repetition_penalty=1.3))
        assert (greedily.do_sample, greedily.temperature, greedily.top_p) == (False, None, None)
        assert greedily.repetition_penalty == 1.3
        assert greedily.max_time is None, "no answer depends on the speed of a machine"
        drawn = generation_config(model, TOKENIZER, GenerationSettings(do_sample=True, top_p=0.9))
        assert (drawn.do_sample, drawn.temperature, drawn.top_p) == (True, 0.3, 0.9)
    finally:
        model.generation_config.update(temperature=None, top_p=None, do_sample=None, max_time=None)


def test_an_answer_ends_where_training_ended_it_too(tiny_model: Path, model: PreTrainedModel) -> None:
    """The tokenizer's token ends what is trained, and a config need not name it."""
    own, tokens = model.generation_config.eos_token_id, greedy(tiny_model, "abc", 8)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[-1])
    expected = tokens.index(tokens[-1]) + 1
    try:
        for named, ends in ((2, [2, 256]), ([256, 2], [256, 2]), (None, [256])):
            model.generation_config.eos_token_id = named
            assert generation_config(model, TOKENIZER, GenerationSettings()).eos_token_id == ends
        model.generation_config.eos_token_id = 256
        decoder, prompt = Decoder(model, tokenizer, GenerationSettings(max_new_tokens=30)), PROMPTS[:1]
        (answer,) = complete(decoder, prompt, [TOKENIZER("abc")["input_ids"]], seed=0, num_done=0)
        assert answer.num_new_tokens == expected < 30
    finally:
        model.generation_config.eos_token_id = own


def test_padding_is_a_token_of_the_model(model: PreTrainedModel) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == model.config.vocab_size, "which the embedding was not resized to"
    encoded, settings = tokenize_prompts(tokenizer, PROMPTS, model.config), GenerationSettings(max_new_tokens=4)
    found = list(complete(Decoder(model, tokenizer, settings), PROMPTS, encoded, seed=0, num_done=0))
    assert [one.completion for one in found] == [one.completion for one in run(model, settings)]


def llama_2_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with the decoder of Llama 2, which strips a space from whatever it decodes."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁a", "▁b", "▁the", "▁longer", "▁prompt", "yes"]
    tokens += [f"<0x{byte:02X}>" for byte in (0x0A, *range(0x80, 0x100))]
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    replaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(replaced)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_piece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose decoder removes spaces before punctuation."""
    vocabulary = {token: number for number, token in enumerate(["[UNK]", "hello", "don", "'", "t", ".", "x", "world"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "answer", "completion"),
    [
        (llama_2_tokenizer(), "a longer prompt", "▁a yes <0x0A> ▁▁ ▁b <0x0A> ▁the", " ayes\n   b\n the"),
        (llama_2_tokenizer(), "မြန်မာစာ", "ကောင်း", "ကောင်း"),
        (llama_2_tokenizer(), "မြန်မာစာ a", "စာ yes", "စာyes"),
        (word_piece_tokenizer(), "hello don '", "t . x ' world", " t. x ' world"),
    ],
    ids=["spaces and lines", "characters of bytes", "characters of bytes, then words", "punctuation"],
)
def test_a_completion_continues_its_prompt(
    model: PreTrainedModel, tokenizer: Any, prompt: str, answer: str, completion: str
) -> None:
    """Also as it is streamed."""
    given, streamed, tokens = Prompt(prompt, "line 1"), list[str](), list[int]()
    for word in answer.split():
        number = tokenizer.convert_tokens_to_ids(word)
        of_bytes = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in word.encode()]
        tokens += of_bytes if number == tokenizer.unk_token_id else [number]
    (ids,) = tokenize_prompts(tokenizer, [given], model.config)
    decoder = Decoder(model, tokenizer, GenerationSettings(max_new_tokens=len(tokens)))
    decoder.config.eos_token_id = None
    forced = iter([*tokens, None])
    hook = model.register_forward_hook(lambda module, args, output: _force(output, next(forced)))
    try:
        (found,) = complete(decoder, [given], [ids], on_text=streamed.append)
    finally:
        hook.remove()
    assert found.completion == completion == "".join(streamed)


def _force(output: Any, token: int | None) -> None:
    """Make `token` the most likely one."""
    if token is not None:
        output.logits[..., token] = 1e9


@pytest.mark.parametrize(
    "template", ["<|begin|>:0 $A:0", "<|begin|>:0 $A:0 <|end|>:0", "$A:0 <|end|>:0 <|end|>:0", "$A:0"]
)
def test_a_decoder_goes_on_after_the_text_itself(template: str) -> None:
    """Special tokens before a prompt are kept; those after it end a text, and of an encoder's input are part of it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|begin|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    before, config = ["<|begin|>"] if "begin" in template else [], llama_config()
    config.vocab_size = len(tokenizer)
    encoded = tokenize_prompts(tokenizer, PROMPTS, config)
    assert [tokenizer.decode(ids) for ids in encoded] == ["".join([*before, prompt.text]) for prompt in PROMPTS]
    assert tokenize(tokenizer, "abc") == encoded[0]
    whole = tokenize_prompts(tokenizer, PROMPTS, T5Config(architectures=["T5ForConditionalGeneration"]))
    assert whole == [tokenizer(prompt.text)["input_ids"] for prompt in PROMPTS]


def test_a_chat_goes_through_the_template() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ModelError, match="chat template"):
        tokenize_prompts(tokenizer, PROMPTS, llama_config(), chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (ids, *_) = tokenize_prompts(tokenizer, PROMPTS, llama_config(), chat=True)
    assert tokenizer.decode(ids) == "[user]abc[assistant]"
    (ids, *_) = tokenize_prompts(tokenizer, PROMPTS, llama_config(), chat=True, system="Be brief.")
    assert tokenizer.decode(ids) == "[system]Be brief.[user]abc[assistant]"


def test_templates_that_expect_contents_in_parts_or_leave_them_out() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "abc{% for m in messages %}[{{ m.role }}]{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    )
    (ids, *_) = tokenize_prompts(tokenizer, PROMPTS, llama_config(), chat=True, system="Be brief.")
    assert tokenizer.decode(ids) == "abc[system]Be brief.[user]abc", "its own text is none of the user"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    system: Any = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert ids == tokenizer.apply_chat_template([system, *parts], return_dict=False)
    row = Prompt("abc", "rows.jsonl, line 1,", None, {"messages": parts})
    with pytest.raises(DataError, match=r"^rows\.jsonl, line 1, has a last message that the chat .* leaves out"):
        tokenize_prompts(tokenizer, [row], llama_config(), chat=True)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}"
    answer = [{"role": "tool", "content": '{"a":"\\\\b"}'}]
    (ids,) = tokenize_prompts(tokenizer, [Prompt("", "1", None, {"messages": answer})], llama_config(), chat=True)
    assert ids == tokenizer.apply_chat_template(answer, return_dict=False)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    with pytest.raises(ModelError, match=r"chat template of .* leaves out the text of a user's message"):
        tokenize_prompts(tokenizer, PROMPTS, llama_config(), chat=True)


def test_a_conversation_is_what_transformers_makes_of_it() -> None:
    """Beside a plain prompt, with an earlier answer, tools, and a system message that the setting or the row gives."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}({{ tool['name'] }}){% endfor %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    turns = [("user", "one?"), ("assistant", "two."), ("user", "three?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tools: Any = [{"name": "search"}]
    prompts = [Prompt("three?", "line 1", None, {"messages": messages, "tools": tools}), Prompt("abc", "line 2")]
    encoded = tokenize_prompts(tokenizer, prompts, llama_config(), chat=True, system="Be brief.")
    whole = [{"role": "system", "content": "Be brief."}, *messages]
    assert encoded[0] == tokenizer.apply_chat_template(
        whole, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(encoded[0]) == "(search)[system]Be brief.[user]one?[assistant]two.[user]three?[assistant]"
    assert tokenizer.decode(encoded[1]) == "[system]Be brief.[user]abc[assistant]"
    own = [Prompt("three?", "line 1", None, {"messages": messages, "system": "Be wordy."})]
    (ids,) = tokenize_prompts(tokenizer, own, llama_config(), chat=True)
    (said,) = tokenizer.batch_decode([ids])
    assert said.startswith("[system]Be wordy.[user]one?")
    with pytest.raises(DataError, match=r"line 1: a message has text; expected role and content"):
        tokenize_prompts(
            tokenizer, [Prompt("", "line 1", None, {"messages": [{"text": ""}]})], llama_config(), chat=True
        )


def test_prompts_that_leave_no_room_are_refused() -> None:
    prompts = [Prompt("x", "file.txt, line 6,"), Prompt("x" * 100, "file.txt, line 7,")]
    tokens, table = [[5], [5] * 100], ContextLength(128, is_table=True)
    assert check_room(prompts, tokens, 28, table) is None
    with pytest.raises(ConfigError, match=r"line 7, has 100 tokens.* 128 tokens.*; shorten it, or generate at most 28"):
        check_room(prompts, tokens, 29, table)
    with pytest.raises(ConfigError, match=r"has 200 tokens.*context of 128 tokens.*; shorten it\.$"):
        check_room(prompts, [[5], [5] * 200], 1, table)
    assert check_room(prompts, tokens, 128, table, has_encoder=True) is None
    with pytest.raises(ConfigError, match=r"max_new_tokens=129.*; shorten it, or generate at most 128"):
        check_room(prompts, tokens, 129, table, has_encoder=True)


def test_prompts_beyond_a_context_of_rotary_positions_are_named_once() -> None:
    prompts, rotary = [Prompt("x", "one"), Prompt("x", "two")], context_length_of(llama_config())
    warning = check_room(prompts, [[5] * 127, [5] * 200], 4, rotary)
    assert warning is not None
    assert "two has 200 tokens" in warning
    assert "context of 128 tokens: positions beyond it were never trained" in warning
    assert check_room(prompts, [[5], [5]], 127, rotary) is None


def test_models_that_do_not_predict_the_next_token_are_refused() -> None:
    with pytest.raises(ModelError, match="a BertForSequenceClassification, which does not predict the next token"):
        check_causal(BertConfig(architectures=["BertForSequenceClassification"]))
    with pytest.raises(ModelError, match="T5EncoderModel, which does not generate text from text"):
        tokenize_prompts(TOKENIZER, PROMPTS, T5Config(architectures=["T5EncoderModel"], is_encoder_decoder=True))


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_encoder_decoder_models_answer_too(tmp_path: Path, device_map: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "t5", vocab_size=257, d_model=16, d_kv=8, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0,
        eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    assert isinstance(config, T5Config)
    plain = T5ForConditionalGeneration(config).eval()
    plain.save_pretrained(tmp_path)
    settings = GenerationSettings(max_new_tokens=6, batch_size=2, output_scores=True)
    decoder = Decoder(load_dispatched(tmp_path, device_map), TOKENIZER, settings)
    found = list(complete(decoder, PROMPTS, tokenize_prompts(TOKENIZER, PROMPTS, decoder.model.config)))
    for row in found:
        ids = torch.tensor([TOKENIZER(row.prompt)["input_ids"]])
        tokens = plain.generate(ids, max_new_tokens=6, do_sample=False)
        assert row.completion == TOKENIZER.decode(tokens[0, 1:], skip_special_tokens=True)
        with torch.no_grad():
            logits = plain(input_ids=ids, decoder_input_ids=tokens[:, :-1]).logits[0].log_softmax(-1)
        expected = logits.gather(-1, tokens[0, 1:, None])[:, 0]
        assert row.log_probabilities == pytest.approx(expected.tolist()[: row.num_new_tokens], abs=1e-4)


def test_beams_are_asked_for_and_shown_when_whole(tiny_model: Path, model: PreTrainedModel) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    batch, shown = [TOKENIZER(prompt.text)["input_ids"] for prompt in PROMPTS], list[str]()
    model.generation_config.update(num_beams=3, length_penalty=2.0)
    try:
        own = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=5))
        beams = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=5, num_beams=3))
        for ids in batch:
            kwargs: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 256, "eos_token_id": 256}
            one = plain.generate(torch.tensor([ids]), **kwargs)[0, len(ids) :].tolist()
            three = plain.generate(torch.tensor([ids]), **kwargs, num_beams=3, length_penalty=2.0)[0, len(ids) :]
            assert own.run([ids], shown.append)[0].tokens == one
            assert "".join(shown) == TOKENIZER.decode(one, skip_special_tokens=True)
            shown.clear()
            assert beams.run([ids], shown.append, PrefixCache())[0].tokens == three.tolist()
            assert shown == [TOKENIZER.decode(three, skip_special_tokens=True)]
            shown.clear()
    finally:
        model.generation_config.update(num_beams=None, length_penalty=None)
    assert str(kv_cache_budget(batch, GenerationSettings(max_new_tokens=5, num_beams=3))).startswith(
        f"{3 * len(batch)} texts"
    )
    with pytest.raises(ConfigError, match=r"output_scores=true cannot be combined with generation\.num_beams=3"):
        check(GenerateSettings("x", "a", generation=GenerationSettings(output_scores=True, num_beams=3)))


def test_beams_of_a_model_that_has_none_name_the_setting() -> None:
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=257))
    beams = Decoder(model.eval(), TOKENIZER, GenerationSettings(max_new_tokens=5, num_beams=3))
    with pytest.raises(ModelError, match=r"Remove generation\.num_beams=3 if the model has no beam search"):
        beams.run([[5, 6]])


@pytest.mark.parametrize(
    "given",
    [
        {"num_return_sequences": 3, "num_beams": 3},
        {"pad_token_id": -1},
        {"stop_strings": ["zz"]},
        {"penalty_alpha": 0.6},
        {"assistant_early_exit": 1},
    ],
    ids=str,
)
def test_a_models_own_ways_do_not_end_the_run(model: PreTrainedModel, given: dict[str, Any]) -> None:
    batch = [TOKENIZER(prompt.text)["input_ids"] for prompt in PROMPTS]
    expected = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=4)).run(batch)
    before = {name: getattr(model.generation_config, name) for name in given}
    model.generation_config.update(**given)
    try:
        assert Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=4)).run(batch) == expected
    finally:
        model.generation_config.update(**before)


def test_rows_end_where_a_stop_string_is_complete(model: PreTrainedModel) -> None:
    batch = [TOKENIZER(prompt.text)["input_ids"] for prompt in PROMPTS]
    settings = GenerationSettings(max_new_tokens=8, output_scores=True)
    whole = Decoder(model, TOKENIZER, settings).run(batch)
    (stop,) = TOKENIZER.batch_decode([whole[0].tokens[2:3]])
    model.generation_config.update(stop_strings=[stop], pad_token_id=65)
    try:
        decoder = Decoder(model, TOKENIZER, settings)
        together, alone = decoder.run(batch), [decoder.run([ids])[0] for ids in batch]
    finally:
        model.generation_config.update(stop_strings=None, pad_token_id=None)
    given = GenerationSettings(max_new_tokens=8, output_scores=True, stop_strings=["never", stop])
    assert Decoder(model, TOKENIZER, given).run(batch) == together
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert len(together[0].tokens) == whole[0].tokens.index(whole[0].tokens[2]) + 1
    assert len({len(answer.tokens) for answer in together}) > 1
    assert all(len(answer.tokens) == len(answer.log_probabilities or ()) for answer in together)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3", "deepseek_v32"])
def test_the_reserved_cache_is_what_a_model_caches(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_latents = {
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "moe_intermediate_size": 32,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
    }
    if family != "deepseek_v32":
        of_latents = {name: value for name, value in of_latents.items() if not name.startswith("index")}
    config = AutoConfig.for_model(family, **sizes, **({} if family == "llama" else of_latents), intermediate_size=48)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        (cache,) = kv_cache_of(model(input_ids=torch.zeros(3, 10, dtype=torch.long), use_cache=True)).values()
    held = sum(value.nbytes for layer in cache.layers for value in vars(layer).values() if torch.is_tensor(value))
    reserved = sum(cache_bytes(model, no_split_blocks(model), KVCacheBudget(3, 10)).values())
    # Until 5.23 the most that a version caches of DeepSeek's tokens is reserved.
    assert reserved == held if Version(transformers.__version__) >= Version("5.23") else reserved >= held


_ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mamba", {"hidden_size": 64, "state_size": 32}),
        ("mamba2", {"hidden_size": 64, "state_size": 32, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
        ("bamba", {**_ATTENTION, **_MAMBA, "attn_layer_indices": [1]}),
        ("falcon_h1", {**_ATTENTION, **_MAMBA, "mamba_d_ssm": 128}),
        ("qwen3_next", {**_ATTENTION, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_states_are_reserved(family: str, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=64, **sizes)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        output = model(input_ids=torch.zeros(3, 10, dtype=torch.long), use_cache=True)
    cache = output.get("cache_params") or next(iter(kv_cache_of(output).values()))
    values = [value for layer in cache.layers for value in vars(layer).values()]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]  # states
    held = sum(value.nbytes for value in values if torch.is_tensor(value))
    reserved = sum(cache_bytes(model, no_split_blocks(model), KVCacheBudget(3, 10)).values())
    assert held <= reserved <= 2 * held


def test_log_probabilities_of_guided_tokens_are_refused(model: PreTrainedModel) -> None:
    model.generation_config.update(guidance_scale=1.5)
    try:
        Decoder(model, TOKENIZER, GenerationSettings())
        with pytest.raises(ConfigError, match=r"output_scores=true cannot be combined with guidance_scale 1\.5"):
            Decoder(model, TOKENIZER, GenerationSettings(output_scores=True))
    finally:
        model.generation_config.update(guidance_scale=None)


@pytest.mark.parametrize(
    "settings",
    [{}, {"output_scores": True}, {"num_beams": 2}, {"do_sample": True, "temperature": 2.0}],
    ids=["greedy", "scores", "beams", "sampling"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_logits_that_are_not_finite(value: float, settings: dict[str, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama_config(tied=False)).eval()
    with torch.no_grad():
        model.lm_head.weight[7, :] = value
    model.save_pretrained(tmp_path)
    decoder = Decoder(load_dispatched(tmp_path), TOKENIZER, GenerationSettings(max_new_tokens=3, **settings))
    with pytest.raises(LossError, match=rf"^The logits of {tmp_path} are not finite: weights or activations"):
        decoder.run([[1, 2, 3], [4]])


def test_forbidden_tokens_are_not_taken_for_logits_that_are_not_finite(model: PreTrainedModel) -> None:
    usual = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=4)).run([[1, 2, 3]])
    model.generation_config.update(suppress_tokens=[*usual[0].tokens, 256])
    try:
        (answer,) = Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=4)).run([[1, 2, 3]])
    finally:
        model.generation_config.update(suppress_tokens=None)
    assert not {*answer.tokens} & {*usual[0].tokens}


@pytest.mark.parametrize("cache", ["dynamic", "none"])
def test_log_probabilities_are_the_models_own(tiny_model: Path, model: PreTrainedModel, cache: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    settings = GenerationSettings(
        max_new_tokens=5, batch_size=3, output_scores=True, do_sample=True, temperature=2.0, cache=cache
    )
    decoder, texts = Decoder(model, TOKENIZER, settings), ["abc", "a longer prompt", "x"]
    batch = [TOKENIZER(text)["input_ids"] for text in texts]
    torch.manual_seed(0)
    for ids, answer in zip(batch, decoder.run(batch), strict=True):
        whole = torch.tensor([ids + answer.tokens])
        with torch.no_grad():
            logits = plain(input_ids=whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, whole[0, len(ids) :, None])[:, 0]
        assert answer.log_probabilities == pytest.approx(expected.tolist(), abs=1e-4)


def test_ids_are_where_the_model_computes(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else transformers copies the logits of each token to the CPU."""
    given: dict[str, Any] = {}

    def generate(**settings: Any) -> None:
        given.update(settings)
        raise InterruptedError

    monkeypatch.setattr(model, "generate", generate)
    monkeypatch.setattr(type(model), "device", torch.device("meta"))  # as if it was on a GPU
    with pytest.raises(InterruptedError):
        Decoder(model, TOKENIZER, GenerationSettings(max_new_tokens=4)).run([[1, 2], [3]])
    assert (given["input_ids"].device.type, given["attention_mask"].device.type) == ("meta", "meta")


def test_a_cache_that_needs_a_gpu_says_so(model: PreTrainedModel) -> None:
    """Also on a machine that has one, where the CPU computes; encoder-decoders cannot have it anywhere."""
    offloaded = GenerationSettings(cache="offloaded")
    with pytest.raises(ConfigError, match="cache=offloaded has no effect, as the model computes on the CPU"):
        Decoder(model, TOKENIZER, offloaded)
    encoder_decoder = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="cache=offloaded does not work for T5ForConditionalGeneration"):
        Decoder(encoder_decoder, TOKENIZER, offloaded)

"""Text to ids and back, against transformers where it is right."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from engine.model.errors import ModelError
from engine.model.gguf_file import GGUFFile
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf
from tests.tiny import ENDOFTEXT, IM_END, IM_START, make_tiny, make_tiny_gguf

TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  leading and trailing   ",
    "tabs\t\tand\r\nnew\n\n\nlines \n ",
    "It's we'll I'm they've you'd O'Neil DON'T",
    "1 23 456 7890 3.14159 1e-5 0x1F 十二",
    "naïve café Ångström ﬁ ŉ straße İstanbul",
    "e\u0301 versus \u00e9, and a\u0308\u0323",
    "日本語のテキスト、中文字符。한국어 문장입니다",
    "العربية עברית हिन्दी ไทย Ελληνικά Русский",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 🇩🇪",
    "\u200b\u200d\ufeff\u00a0\u3000\u2028 odd spaces",
    "def f(x):\n    return x ** 2  # comment\n\nclass A:\n\tpass\n",
    "for(int i=0;i<n;++i){a[i]^=~b[i]>>3;}",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c<|endoftext|>",
    "<|im_start|<|im_end|>|> <|IM_END|> <| im_end |>",
    "\x00\x01\x7f\x80\xff",
    "\U0010ffff\U000e0001\ue000",
    "x" * 500 + " " * 100 + "y",
    "https://example.org/a?b=c&d=%20#e user@host.tld C:\\path\\to",
]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Tokenizer:
    return tokenizer_from_folder(tiny_model)


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_path))


@pytest.fixture(scope="module")
def known_bytes(real: Tokenizer) -> set[int]:
    tokens = map(real.token_bytes, range(real.vocab_size))
    return {token[0] for token in tokens if len(token) == 1}


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizer_equals_transformers(
    real: Tokenizer, reference: transformers.PreTrainedTokenizerFast, text: str
) -> None:
    ids = real.encode(text, add_special_tokens=True)
    assert ids == reference(text)["input_ids"]
    for skip in (False, True):
        assert real.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
def test_real_tokenizer_splits_digits_first_as_the_model_was_trained(
    real: Tokenizer, reference: transformers.PreTrainedTokenizerFast
) -> None:
    """As its tokenizer.json says, and llama.cpp does; transformers, from a GGUF file, takes a space into the number."""
    text = "indent:    42\n\n  7 x  ٣ ½ Ⅷ"
    assert real.encode(text, add_special_tokens=False) != reference.encode(text, add_special_tokens=False)

    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    as_derived = reference.backend_tokenizer.pre_tokenizer
    reference.backend_tokenizer.pre_tokenizer = published
    try:
        for each in [text, *TEXTS]:
            assert real.encode(each, add_special_tokens=False) == reference.encode(each, add_special_tokens=False)
    finally:
        reference.backend_tokenizer.pre_tokenizer = as_derived


@pytest.mark.model
@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=200))
def test_real_decode_undoes_encode(real: Tokenizer, known_bytes: set[int], text: str) -> None:
    """But for the bytes this vocabulary has no token for, which only unassigned characters and a few rare ones use."""
    assume(known_bytes.issuperset(text.encode()))
    assert real.decode(real.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.mark.model
def test_real_special_tokens(real: Tokenizer) -> None:
    assert real.eos_token_ids == {0, 2}
    assert real.bos_token_id == 1
    assert (real.vocab_size, real.max_token_id) == (49152, 49151)
    assert [real.token_str(id_) for id_ in (0, 1, 2, 28120, 905)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "hello",
        " world",
    ]


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=200))
def test_decode_undoes_encode(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_folder_and_file_agree_with_transformers(tmp_path: Path, tiny: Tokenizer, text: str) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf")
    from_file = tokenizer_from_gguf(GGUFFile(path))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "m.hf")(text)["input_ids"]
    assert tiny.encode(text, add_special_tokens=True) == expected
    assert from_file.encode(text, add_special_tokens=True) == expected


def test_special_tokens_in_text_are_recognised_and_can_be_hidden(tiny: Tokenizer) -> None:
    ids = tiny.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (IM_START, IM_END)
    assert tiny.decode(ids, skip_special_tokens=True) == "hi"
    assert tiny.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_half_a_surrogate_pair_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        tiny.encode(json.loads('"\\ud83d"'), add_special_tokens=False)


def test_encodings_are_counted_and_decodings_are_not(tiny_model: Path) -> None:
    tokenizer = tokenizer_from_folder(tiny_model)
    tokenizer.encode("a", add_special_tokens=False)
    tokenizer.encode("b", add_special_tokens=True)
    tokenizer.decode([1, 2], skip_special_tokens=True)
    tokenizer.stream(skip_special_tokens=True).step([1])
    tokenizer.render_chat([{"role": "user", "content": "a"}])
    assert tokenizer.calls == 2


def test_unknown_ids_decode_to_nothing(tiny: Tokenizer) -> None:
    assert tiny.max_token_id == 319
    assert tiny.decode([320, 5000], skip_special_tokens=False) == ""
    assert tiny.token_str(320) == ""
    assert tiny.stream(skip_special_tokens=False).step([320]) == ""


def change(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | values))


def test_eos_ids_are_collected_from_every_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    assert tokenizer_from_folder(folder).eos_token_ids == {IM_END}
    change(folder, "config.json", eos_token_id=7)
    change(folder, "generation_config.json", eos_token_id=[8, ENDOFTEXT])
    change(folder, "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    assert tokenizer_from_folder(folder).eos_token_ids == {7, 8, ENDOFTEXT, IM_START, IM_END}


@pytest.mark.parametrize("value", ["two", [1, "two"], 1.5])
def test_eos_that_is_no_id_is_refused(tmp_path: Path, value: object) -> None:
    folder = make_tiny(tmp_path / "m")
    change(folder, "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match="eos_token_id must be a token id or a list of them"):
        tokenizer_from_folder(folder)


def test_gguf_eos_includes_the_end_of_a_turn_and_of_the_text(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf")
    tokenizer = tokenizer_from_gguf(GGUFFile(path))
    assert tokenizer.eos_token_ids == {IM_END, ENDOFTEXT}
    assert tokenizer.bos_token_id == ENDOFTEXT


def test_settings_for_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change(folder, "tokenizer.json", truncation=truncation)
    assert len(tokenizer_from_folder(folder).encode("x" * 50, add_special_tokens=False)) == 50


def test_threads_share_a_tokenizer(tiny_model: Path) -> None:
    tokenizer = tokenizer_from_folder(tiny_model)
    texts = [f"text {i} " * 20 for i in range(400)]
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda text: tokenizer.encode(text, add_special_tokens=False), texts))
        strings = list(threads.map(tokenizer.token_str, range(tokenizer.vocab_size)))
    assert ids == expected
    assert tokenizer.calls == 2 * len(texts)
    assert strings == [tokenizer_from_folder(tiny_model).token_str(i) for i in range(tokenizer.vocab_size)]

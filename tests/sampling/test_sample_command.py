"""`python -m stages sample`: what it prints."""

import torch
from tiny_alignment import END, make_checkpoint, make_model, make_tokenizer
from tokenizers.processors import TemplateProcessing

from stages.modeling.checkpoint import save_checkpoint
from stages.sampling.cli import main, text_ids, text_pieces


def speaking_checkpoint(folder, text):
    """A model that says `text` and ends, whatever it is asked: each position's logits come from its position alone."""
    folder.mkdir()
    tokenizer = make_tokenizer()
    model = make_model("gpt2", vocab=len(tokenizer))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    start = len(tokenizer(prompt)["input_ids"]) - 1
    said = [*tokenizer(text)["input_ids"], END]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        codes = torch.randn(len(tokenizer), 32, generator=torch.Generator().manual_seed(0))
        model.lm_head.weight.copy_(codes)
        model.config.tie_word_embeddings = False
        model.transformer.wte.weight = torch.nn.Parameter(torch.zeros_like(codes))
        for place, token in enumerate(said):
            model.transformer.wpe.weight[start + place] = 10 * codes[token]
    save_checkpoint(model, tokenizer, folder)
    return folder


def test_the_answer_to_a_chat_prompt_is_printed_without_markers(tmp_path, capsys):
    folder = speaking_checkpoint(tmp_path / "model", "Grüße ✓")
    assert main([str(folder), "hi"]) == 0
    assert capsys.readouterr().out == "Grüße ✓\n"


def test_characters_of_several_tokens_are_printed_whole():
    tokenizer = make_tokenizer()
    ids = tokenizer("a✓ü🙂b")["input_ids"]
    assert list(text_pieces(tokenizer, iter(ids))) == ["a", "✓", "ü", "🙂", "b"]
    cut = ids[:-2]  # ends inside of a character
    assert "".join(text_pieces(tokenizer, iter(cut))).startswith("a✓ü")


def test_sampling_repeats_with_its_seed(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "model")

    def said(*options):
        assert main([str(folder), "hello", "--max-new-tokens", "12", *options]) == 0
        return capsys.readouterr().out

    assert said("--temperature", "1", "--seed", "5") == said("--temperature", "1", "--seed", "5")
    assert said("--temperature", "1", "--seed", "5") != said("--temperature", "1", "--seed", "6")
    assert said("--raw") != said()


def test_what_cannot_be_answered_is_said_in_one_line(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "model", positions=32)
    for arguments, message in (
        ([str(tmp_path / "none"), "hi"], "is not a folder"),
        ([str(tmp_path), "hi"], "tokenizer"),
        ([str(folder), ""], "the prompt is empty"),
        ([str(folder), "x" * 40], "more than the model's 32 positions"),
        ([str(folder), "hi", "--temperature", "-1"], "temperature"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_text_to_go_on_with_begins_as_the_tokenizer_begins_it_and_has_no_end():
    tokenizer = make_tokenizer()
    plain = tokenizer("ab", add_special_tokens=False)["input_ids"]
    start, end = tokenizer.convert_ids_to_tokens([END + 1, END])
    names = [(start, END + 1), (end, END)]
    for single, expected in (
        ("$A", plain),
        (f"$A {end}", plain),
        (f"{start} $A {end}", [END + 1, *plain]),
    ):
        tokenizer.bos_token = start
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=names)
        assert text_ids(tokenizer, "ab") == expected
    assert text_ids(tokenizer, f"{start}ab") == [END + 1, *plain]

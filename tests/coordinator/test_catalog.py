import pytest

from common.errors import InvalidRequestError, UnknownModelError
from coordinator.catalog import Catalog
from tests.gguf_files import write_tiny_llama


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    (folder / "sub").mkdir(parents=True)
    write_tiny_llama(folder / "one.gguf", layers=2)
    write_tiny_llama(folder / "sub" / "two.gguf", layers=2, max_tensors_per_file=8)
    (folder / "broken.gguf").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (folder / "notes.txt").write_text("no model")
    write_tiny_llama(tmp_path / "outside.gguf", layers=2)
    return folder


def test_every_model_is_listed_once_by_name(models):
    catalog = Catalog([str(models)])
    assert [entry.name for entry in catalog.entries()] == ["broken", "one", "sub/two"]
    assert catalog.find("sub/two").path.name.startswith("two-00001-of-")


@pytest.mark.parametrize(
    "name", ["one", "one.gguf", "{models}/one.gguf", "{models}/sub/../one.gguf", "./one.gguf"]
)
def test_a_model_is_found_by_name_file_or_path(models, name):
    assert Catalog([str(models)]).find(name.format(models=models)).name == "one"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "{models}/../outside.gguf", "../outside.gguf", "{models}2/x.gguf"]
)
def test_a_path_outside_is_refused(models, path):
    with pytest.raises(InvalidRequestError, match="outside the model directories"):
        Catalog([str(models)]).find(path.format(models=models))


def test_an_unknown_name_lists_those_there_are(models):
    with pytest.raises(UnknownModelError, match="one, sub/two"):
        Catalog([str(models)]).find("three")
    with pytest.raises(UnknownModelError, match="--model-dir"):
        Catalog([]).find("three")


def test_info_tells_what_a_file_is_or_what_is_wrong_with_it(models):
    catalog = Catalog([str(models)])
    info = {entry.name: catalog.info(entry) for entry in catalog.entries()}
    assert info["one"].architecture == "llama" and info["one"].num_layers == 2
    assert info["one"].has_tokenizer and not info["one"].problem
    assert "PNG" in info["broken"].problem
    assert info["sub/two"].file_bytes > 0

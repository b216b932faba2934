"""Fixtures that several modules use."""
import pytest


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> str:
    """The Llama of llama.py, saved as a user would have it."""
    from llama import make_llama

    folder = tmp_path_factory.mktemp("llama")
    make_llama().save_pretrained(folder)
    return str(folder)

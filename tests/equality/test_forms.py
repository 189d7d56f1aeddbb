"""Every form with one model, quickly: what `make quick` sees of equality. The matrices beside this file have all the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.equality import forms
from tests.equality.test_equality import BOUND, difference, plain

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def saved(once, launch):
    """saved(strategy) -> the weights that two workers ended with"""

    def launched(strategies, *options):
        def make(folder):
            done = launch(HERE / "forms.py", str(folder), *strategies, options=options)
            assert done.code == 0, done.err[-4000:]

        return once(f"forms {strategies}", make)

    def weights(strategy):
        if strategy in forms.WITHOUT_SERVERS:
            folder = launched(forms.WITHOUT_SERVERS)
        else:
            folder = launched(forms.WITH_SERVERS, "--servers", "2", "--strategy", "ps")
        return load_file(folder / f"{strategy}.safetensors")

    return weights


@pytest.mark.parametrize("strategy", [*forms.WITHOUT_SERVERS, *forms.WITH_SERVERS])
def test_every_form_ends_with_the_weights_of_one_process(saved, strategy):
    assert difference(saved(strategy), plain(forms.case(strategy))) <= BOUND

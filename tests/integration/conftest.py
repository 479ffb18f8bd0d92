import pytest
from command import Run


@pytest.fixture
def start(tmp_path):
    """Starts `headrace train`; whatever is left of it at the end is killed."""
    runs = []

    def make(*flags):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, *flags))
        return runs[-1]

    yield make
    for run in runs:
        run.clean_up()

from tests.equality.conftest import launch as launch

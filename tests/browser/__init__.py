"""The panel in a real browser; what fails in these helpers is told with its values, as in a test."""

import pytest

pytest.register_assert_rewrite("tests.browser.lab", "tests.browser.layout")

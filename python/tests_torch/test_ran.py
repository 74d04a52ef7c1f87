"""The documentation's table of tests with live engines."""

import ran


def test_the_table_is_that_of_the_tests_that_ran() -> None:
    assert ran.main("--check") == 0

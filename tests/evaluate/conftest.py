"""With this file here, pytest lets the tests in folders below import the examples beside it."""

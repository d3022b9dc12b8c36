"""Makes the modules beside this file importable from the folders below it."""

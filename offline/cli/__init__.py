"""The programs `ppd` and `ppd-build-table`, and the commands that measure."""

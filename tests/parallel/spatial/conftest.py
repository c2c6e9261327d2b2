"""Files of this folder that are not tests."""

collect_ignore = [
    # A script and its parts, which import each other: test_operator_database.py runs it in a process of its own.
    "database_calls.py",
    "differential.py",
    "module_database.py",
    "operator_database.py",
    "operator_table.py",
    "table_samples.py",
    "volume_samples.py",
]

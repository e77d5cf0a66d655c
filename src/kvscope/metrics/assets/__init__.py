"""What is generated from the catalog: dictionary, dashboard, recording rules, alerts with their tests, runbook.

Offline. In: the catalog. Out: the text of files, by name.
"""

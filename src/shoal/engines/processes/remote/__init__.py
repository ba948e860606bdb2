"""Agents on other machines: how coordinator and agents connect, trust each other, and exchange requests and files.

May import the other modules of `engines.processes`, which do not import this package, except `launch`.
"""

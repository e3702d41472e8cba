"""The report of ``zerojax report``: this machine, and the features of zerojax that work on it.

Start with :func:`zerojax.doctor.report.report`. The environment comes in; devices, versions,
settings, extras and outcomes of checks come out. ``checks`` runs tiny steps and compiles;
``packages`` reads the metadata of installed packages. Nothing is printed here:
``zerojax/cli/report.py`` formats the report.
"""

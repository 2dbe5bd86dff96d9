"""The commands, one module each: its options, and its action. `tcverify.cli.main` lists them.

Commands import slow modules, torch above all, inside of functions; see `tcverify.cli.importing`.
"""

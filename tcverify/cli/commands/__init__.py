"""The commands, a module each: its options, and what it does. `tcverify.cli.main` names them.

What takes seconds to import, torch above all, a command imports inside of its functions; see `tcverify.cli.importing`.
"""

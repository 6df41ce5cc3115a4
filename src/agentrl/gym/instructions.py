"""What a language model that has never seen the BugFix environment is told: the task and the actions."""

INSTRUCTIONS = """\
You repair a Python function that has a bug. Every reply is one line, one of these actions and nothing else:
view
run
edit LINE TEXT
submit
view shows the function with its lines numbered. run runs the visible tests. edit replaces a line and keeps
its indentation: edit 3 return x makes line 3 return x. submit ends the task, and hidden tests decide whether
the function is right. Begin with view."""

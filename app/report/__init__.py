"""The report: one self-contained page that can be shown to whoever approves the money, and the same as Markdown."""

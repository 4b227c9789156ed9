"""The known cases: a template and the figures of each page under docs/cases. Run: scripts/cases"""

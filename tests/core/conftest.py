from hypothesis import settings

# A deadline measures the machine's other work, not the rule under test.
settings.register_profile("core", deadline=None)
settings.load_profile("core")

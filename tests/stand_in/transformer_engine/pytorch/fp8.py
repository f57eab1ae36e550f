import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


@contextlib.contextmanager
def fp8_autocast(*args, **kwargs):
    yield

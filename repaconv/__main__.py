"""The command `repaconv`, and `python -m repaconv`."""

import signal
from threading import current_thread, main_thread


def main() -> None:
    """Run the command line. Ctrl-C during its imports, which take half a second, ends it without a traceback."""
    settable = current_thread() is main_thread()
    if settable and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from repaconv.cli.main import main as run

    run()


if __name__ == "__main__":
    main()

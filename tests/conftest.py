"""What holds for every test: signals reach the processes that tests start, wherever the tests run."""

import signal

# Started in the background or under nohup, a process has these ignored, and so would all its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

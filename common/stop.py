"""SIGTERM and SIGUSR1, which schedulers and launchers send, ask a run to save and stop."""

import signal


class StopSignal:
    """`requested` is True once SIGTERM or SIGUSR1 came after listen().

    The ranks add it up with their metrics, so that all of them stop after the same step.
    """

    def __init__(self):
        # A plain bool: a threading.Event takes a lock, on which a second signal could wait.
        self.requested = False
        self.listening = False

    def listen(self) -> None:
        """From now on they do not end this process. Before the first step nothing is to be saved.

        A rank may then wait in C++ for the others, where Python would not notice a signal.
        """
        if self.listening:
            return
        self.listening = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._request)
            # Restart interrupted system calls: libraries may not expect the signal.
            signal.siginterrupt(number, False)

    def _request(self, *_):
        self.requested = True

"""Which values share memory, for how long they live, and the checks of peaks and of communication buffers."""

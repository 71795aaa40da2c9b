package anarchon

import "golang.org/x/sys/unix"

// clock gives milliseconds that only go forward and go on while the machine sleeps (S3), rounded
// down, from an origin that means nothing.
type clock interface{ now() millis }

// bootClock is the system's own. Go's own monotonic clock stops while the machine sleeps.
type bootClock struct{}

func (bootClock) now() millis {
	var now unix.Timespec
	if err := unix.ClockGettime(bootClockID, &now); err != nil {
		panic("anarchon: the system has no clock that counts sleep: " + err.Error())
	}
	return millis(now.Nano() / 1_000_000)
}

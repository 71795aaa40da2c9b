package anarchon

import (
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
)

// millis is a time or a length in whole milliseconds, as the session counts.
type millis int64

func wireToMillis(wire *durationpb.Duration) millis {
	return millis(wire.GetSeconds()*1_000 + int64(wire.GetNanos())/1_000_000)
}

func (m millis) duration() time.Duration { return time.Duration(m) * time.Millisecond }

// text returns the shortest text that means m: "1h30m"; zero is "0s".
func (m millis) text() string {
	var text strings.Builder
	for _, unit := range []struct {
		name   string
		length millis
	}{{"w", 604_800_000}, {"d", 86_400_000}, {"h", 3_600_000}, {"m", 60_000}, {"s", 1_000}, {"ms", 1}} {
		if number := m / unit.length; number > 0 {
			text.WriteString(strconv.FormatInt(int64(number), 10))
			text.WriteString(unit.name)
			m %= unit.length
		}
	}
	if text.Len() == 0 {
		return "0s"
	}
	return text.String()
}

func textOf(duration time.Duration) string { return millis(duration / time.Millisecond).text() }

// checkDuration returns an ErrJob unless the duration is whole milliseconds from least to most.
func checkDuration(field string, value, least, most time.Duration) error {
	if value%time.Millisecond != 0 {
		return jobError("%s %v: must be whole milliseconds", field, value)
	}
	if value < least || value > most {
		return jobError("%s %v: must be %s to %s", field, value, textOf(least), textOf(most))
	}
	return nil
}

package anarchon

import (
	"errors"
	"regexp"
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

// units, largest first: the order in which they are written.
var units = []struct {
	name   string
	length millis
}{{"w", 604_800_000}, {"d", 86_400_000}, {"h", 3_600_000}, {"m", 60_000}, {"s", 1_000}, {"ms", 1}}

const (
	longestText     = 64
	longestDuration = millis(36_600 * 86_400_000)
	grammar         = `whole numbers with the units w d h m s ms, largest first, each once, as in "1h30m"`
)

var (
	durationPart = regexp.MustCompile(`^([0-9]{1,12})(w|d|h|ms|m|s)`)
	mereNumber   = regexp.MustCompile(`^[0-9]+$`)
	fraction     = regexp.MustCompile(`^[0-9]*[.,][0-9]+[a-z]+$`)
	calendarUnit = regexp.MustCompile(`^[0-9]+(mo|y)$`)
)

// ParseDuration returns what a text such as "90s", "1h30m" or "250ms" means: the form that
// Anarchon's configuration, command line and other clients have, for settings that people write.
// Unlike [time.ParseDuration] it knows days and weeks, and no fractions. The error says what would be
// right.
func ParseDuration(text string) (time.Duration, error) {
	rest, next := text, 0
	var total millis
	for next < len(units) && len(text) <= longestText {
		match := durationPart.FindStringSubmatch(rest)
		if match == nil {
			break
		}
		for next < len(units) && units[next].name != match[2] {
			next++
		}
		if next == len(units) {
			break
		}
		number, _ := strconv.ParseInt(match[1], 10, 64) // 12 digits at most
		if millis(number) > longestDuration/units[next].length {
			return 0, errors.New("a duration cannot be longer than a hundred years")
		}
		total += millis(number) * units[next].length
		rest = rest[len(match[0]):]
		next++
	}
	if rest != "" || text == "" {
		return 0, errors.New(whatToWrite(text))
	}
	if total > longestDuration {
		return 0, errors.New("a duration cannot be longer than a hundred years")
	}
	return total.duration(), nil
}

func whatToWrite(text string) string {
	switch {
	case len(text) > longestText:
		return "a duration has at most 64 characters"
	case strings.TrimSpace(text) != text:
		return "no white space around a duration"
	case mereNumber.MatchString(text):
		return `a number needs its unit: "` + text + `s" is seconds, "` + text + `m" minutes`
	case fraction.MatchString(text):
		return "no fractions (90m, not 1.5h): write " + grammar
	case calendarUnit.MatchString(text):
		return "months and years have no fixed length: write days, or a cron expression"
	}
	return "write " + grammar
}

// text returns the shortest text that means m: "1h30m"; zero is "0s".
func (m millis) text() string {
	var text strings.Builder
	for _, unit := range units {
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

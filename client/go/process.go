package anarchon

import (
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// Version is the client library's.
const Version = "0.1.0"

func clientInfo(watched bool) *anarchonv1.ClientInfo {
	host, _ := os.Hostname() // it is for people only
	info := &anarchonv1.ClientInfo{
		Language: "go", Version: Version, Host: host, ProcessId: int32(os.Getpid()),
	}
	if watched {
		info.ProcessStartTicks, info.PidNamespace = processIdentity()
	}
	return info
}

// processIdentity returns what tells this process from a later one with its number; zeros where
// there is no /proc.
func processIdentity() (startTicks int64, pidNamespace uint64) {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0, 0
	}
	namespace, err := os.Stat("/proc/self/ns/pid")
	if err != nil {
		return 0, 0
	}
	// The command's name, in brackets, may hold anything; the fields are counted after it.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	system, isSystem := namespace.Sys().(*syscall.Stat_t)
	if len(fields) <= 22-3 || !isSystem {
		return 0, 0
	}
	startTicks, err = strconv.ParseInt(fields[22-3], 10, 64)
	if err != nil {
		return 0, 0
	}
	return startTicks, system.Ino
}

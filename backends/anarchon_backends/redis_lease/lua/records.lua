-- Jobs and runs, as they are stored.

local TRIGGERS = { schedule = true, manual = true, catch_up = true }
local CAUSES = { claim = true, takeover = true, retry = true }
local FINAL = { success = true, failed = true, skipped = true }
local OPEN = { due = true, claimed = true, running = true, interrupted = true, retrying = true }
local HELD = { claimed = true, running = true, interrupted = true } -- of attempts
local CANCELLED_AS = { timeout = 'timeout', requested = 'cancelled', superseded = 'superseded' }

-- Jobs --------------------------------------------------------------------------------------

-- What the store keeps per job; `settled` is that of the schedule asked for (nil: not known).
local function load_job(key, schedule_id)
  local values = read(key, 'HMGET', key, 'floor', 'fence', 'definition_id', 'schedule_id',
    'definition_at', 'paused_at', 'settled:' .. schedule_id, 'since:' .. schedule_id)
  return {
    floor = number(key, values[1], -1),
    fence = number(key, values[2], 0),
    definition_id = values[3] or '',
    schedule_id = values[4] or '',
    definition_at = number(key, values[5], 0),
    paused_at = number(key, values[6], nil),
    settled = number(key, values[7], nil),
    since = number(key, values[8], nil),
  }
end

local function fence_of(key)
  local fine, fence = pcall(read, key, 'HGET', key, 'fence')
  if not fine and type(fence) ~= 'table' then
    error(fence, 0)
  end
  return fine and fence or '0'
end

-- Runs --------------------------------------------------------------------------------------

local NOTHING = { __index = {} } -- what a field is that is not there: '' or 0, or nil for a number
for field, kind in pairs(KIND) do
  if kind ~= 'number' then
    NOTHING.__index[field] = kind == 'text' and '' or 0
  end
end

-- A run is its fields, and as text those that are stored.
local function fresh_run(job, slot)
  local stored = { job = job, slot = text(slot) }
  return setmetatable({ job = job, slot = slot, stored = stored, new = true }, NOTHING)
end

-- Raises where a run that is not final lacks what the rules go by.
local function check_open(key, run)
  if run.state == 'due' then
    if run.attempt > 0 then
      broken(key, 'due, and with an attempt')
    end
    return
  end
  if run.attempt < 1 then
    broken(key, 'begun, and without an attempt')
  end
  if run.state == 'retrying' then
    if not run.retry_at then
      broken(key, 'retrying at no time')
    end
  elseif run.freed == '' and not (run.lease_until and run.lease_length_ms and run.lease_end_at) then
    broken(key, 'neither freed nor leased')
  end
  if run.cancel ~= '' and not CANCELLED_AS[run.cancel] then
    broken(key, 'cancel ' .. run.cancel)
  end
end

local function check_run(key, run)
  if not FINAL[run.state] and not OPEN[run.state] then
    broken(key, 'state ' .. run.state)
  end
  if not TRIGGERS[run.trigger] then
    broken(key, 'trigger ' .. run.trigger)
  end
  if run.attempt > 0 then
    if not CAUSES[run.cause] or run.token == '' or run.fence == 0 or run.claimed_at == 0 then
      broken(key, 'an attempt without a cause, token, fence or time')
    end
    if not HELD[run.attempt_state] and not FINAL[run.attempt_state] then
      broken(key, 'attempt_state ' .. run.attempt_state)
    end
  end
  if OPEN[run.state] then
    check_open(key, run)
  end
end

-- The slot's row, or nil.
local function load_run(job_key, job, slot)
  local key = job_key .. ':' .. text(slot)
  local values = read(key, 'HMGET', key, unpack(FIELDS))
  if not values[1] then
    return nil
  end
  local run = fresh_run(job, slot)
  run.new = false
  for i, field in ipairs(FIELDS) do
    local value = values[i]
    if value and value ~= '' then
      run.stored[field] = value
      run[field] = KIND[field] == 'text' and value or number(key, value)
    end
  end
  check_run(key, run)
  return run
end

-- A field as it is stored; '' where it is nothing.
local function stored_as(field, value)
  if value == nil or (value == 0 and KIND[field] == 'count') then
    return ''
  end
  return type(value) == 'number' and string.format('%.0f', value) or value
end

-- Brings `stored` up to date; what changed, as HSET takes it.
local function changes_of(run)
  local changes, stored = {}, run.stored
  for field, value in pairs(run) do
    if KIND[field] then
      value = stored_as(field, value)
      if value ~= (stored[field] or '') then
        changes[#changes + 1] = field
        changes[#changes + 1] = value
        stored[field] = value
      end
    end
  end
  for field, value in pairs(stored) do
    if run[field] == nil and value ~= '' then
      changes[#changes + 1] = field
      changes[#changes + 1] = ''
      stored[field] = ''
    end
  end
  return changes
end

local news = 0 -- how often others should look soon
local ended_in = {} -- by key, the jobs of which a run that was begun has ended

-- Whether others should look soon: it may be claimed, or is to stop (`machine.Saved.is_news`).
local function is_news(run)
  if run.freed ~= '' or (run.state == 'due' and run.blocking_slot == 0) then
    return true
  end
  local to_stop = run.cancel == 'requested' or run.cancel == 'superseded'
  return to_stop and not FINAL[run.state]
end

-- What goes with a run that has ended, or begins to be open.
local function index_run(job_key, run)
  local slot = run.stored.slot
  if run.new then
    redis.call('ZADD', job_key .. ':runs', slot, slot)
    if NS then
      redis.call('ZADD', NS .. ':runs', slot, slot .. ' ' .. run.job)
    end
  end
  if not FINAL[run.state] then
    if run.new then
      redis.call('ZADD', job_key .. ':open', slot, slot)
    end
    return
  end
  if not run.new then
    redis.call('ZREM', job_key .. ':open', slot)
    if run.trigger == 'manual' then
      redis.pcall('HDEL', job_key .. ':payloads', slot)
    end
  end
  if run.attempt > 0 then
    ended_in[job_key] = run.job
  end
end

-- Writes what changed of a run.
local function save_run(job_key, run)
  local changes = changes_of(run)
  if run.past then
    changes[#changes + 1] = 'past:' .. text(run.past.attempt)
    changes[#changes + 1] = run.past.record
    run.past = nil
  end
  if #changes == 0 then
    return
  end
  redis.call('HSET', job_key .. ':' .. run.stored.slot, unpack(changes))
  index_run(job_key, run)
  run.new = false
  if is_news(run) then
    news = news + 1
  end
end

-- The run for an answer, as it is stored.
local function shown(run)
  return run and run.stored
end

-- The slots of the job's runs that are not final, ascending.
local function open_slots(job_key)
  return read(job_key .. ':open', 'ZRANGE', job_key .. ':open', 0, -1)
end

-- The job's runs that are not final, at other slots than `slot`, ascending.
local function open_runs(job_key, job, slot)
  local found = {}
  for _, each in ipairs(open_slots(job_key)) do
    local run = tonumber(each) ~= slot and load_run(job_key, job, tonumber(each))
    if run and not FINAL[run.state] then
      found[#found + 1] = run
    end
  end
  return found
end

-- The job's oldest run that waits, of those that can be read.
local function oldest_due(job_key, job)
  for _, slot in ipairs(unless_broken(open_slots, job_key) or {}) do
    local run = unless_broken(load_run, job_key, job, tonumber(slot))
    if run and run.state == 'due' then
      return run
    end
  end
  return nil
end


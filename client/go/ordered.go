package anarchon

import (
	"iter"
	"slices"
)

// ordered is a map by token that remembers in which order its entries came. The zero value is empty.
type ordered[V any] struct {
	keys   []string
	values map[string]V
}

func (o *ordered[V]) len() int { return len(o.keys) }

func (o *ordered[V]) get(key string) (V, bool) {
	value, there := o.values[key]
	return value, there
}

func (o *ordered[V]) has(key string) bool {
	_, there := o.values[key]
	return there
}

func (o *ordered[V]) put(key string, value V) {
	if o.values == nil {
		o.values = map[string]V{}
	}
	if !o.has(key) {
		o.keys = append(o.keys, key)
	}
	o.values[key] = value
}

// take removes the entry, and returns what it was.
func (o *ordered[V]) take(key string) (V, bool) {
	value, there := o.values[key]
	if there {
		delete(o.values, key)
		o.keys = slices.Delete(o.keys, slices.Index(o.keys, key), slices.Index(o.keys, key)+1)
	}
	return value, there
}

func (o *ordered[V]) clear() { *o = ordered[V]{} }

// all yields the entries there are now, in their order; the body may take them away.
func (o *ordered[V]) all() iter.Seq2[string, V] {
	keys := slices.Clone(o.keys)
	return func(yield func(string, V) bool) {
		for _, key := range keys {
			if value, there := o.values[key]; there && !yield(key, value) {
				return
			}
		}
	}
}

// drain empties the map, and yields what was in it.
func (o *ordered[V]) drain() iter.Seq2[string, V] {
	was := *o
	o.clear()
	return was.all()
}
